"""A mixture of precisions, written down for the tools that quantize: one file per tool."""
