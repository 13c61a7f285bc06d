"""Computes numbers with errors from scores."""
