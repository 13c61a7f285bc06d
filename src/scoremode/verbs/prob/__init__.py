"""P(target | prompt): pairs of texts ─▶ tokens, cut at the boundary ─▶ scores, in memory or in a file."""
