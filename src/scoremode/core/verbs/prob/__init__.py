"""Computes P(target | prompt): pairs of texts are encoded, cut at the boundary and scored, in memory or in a file."""
