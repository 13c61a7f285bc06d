"""How many bytes of logits may be alive at once. Apart, so that a dry run knows it without importing torch."""

DEFAULT_BUDGET = 32 << 20
