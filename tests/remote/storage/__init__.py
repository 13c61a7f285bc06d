"""Tests of places."""
