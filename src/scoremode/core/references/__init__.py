"""Stored distributions of a baseline: references (hidden states and a head) and llama.cpp's .kld files."""
