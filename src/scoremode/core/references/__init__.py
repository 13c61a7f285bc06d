"""References: the hidden states of a baseline, stored with its head."""
