"""Runs and comparisons for people: terminal, HTML page, notebook, model card."""
