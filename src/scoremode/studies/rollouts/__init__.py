"""Texts that a model wrote, and what other models think of them."""
