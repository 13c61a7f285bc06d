"""Presents runs and comparisons to people: terminal, HTML page, notebook, model card."""
