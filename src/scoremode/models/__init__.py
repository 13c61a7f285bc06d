"""A model's name ─▶ what is known of it before a weight is loaded."""
