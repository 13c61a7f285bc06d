"""The weights of a candidate, de-quantized: one file per format."""
