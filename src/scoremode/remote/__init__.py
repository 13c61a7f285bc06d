"""What is not this process and this disk: one folder each, which can be deleted."""
