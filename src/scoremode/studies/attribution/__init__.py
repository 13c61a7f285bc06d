"""Which weights of a quantized model do the damage."""
