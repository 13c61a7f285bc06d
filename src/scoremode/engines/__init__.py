"""Anything that turns windows into answers."""
