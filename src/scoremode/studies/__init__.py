"""Questions beyond those of the core: one folder each, which can be deleted."""
