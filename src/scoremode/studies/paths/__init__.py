"""One model in several settings, compared with itself."""
