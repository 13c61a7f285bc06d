"""Engines turn a plan into answers: their interface, their registry, and one folder per engine."""
