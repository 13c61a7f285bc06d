"""The version of scoremode, below all rooms."""

__version__ = "0.1.0"
