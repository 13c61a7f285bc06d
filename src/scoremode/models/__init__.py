"""A model's name ─▶ what is known about it before any weight is loaded."""
