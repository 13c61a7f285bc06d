"""Finds the facts about a named model that are known before any weight is loaded."""
