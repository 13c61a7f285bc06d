"""Engines turn a plan into answers: one folder per engine."""
