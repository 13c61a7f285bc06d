"""Scores ─▶ numbers with errors."""
