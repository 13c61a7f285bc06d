"""Distributions of a baseline on disk: references (hidden states and a head) and llama.cpp's .kld files."""
