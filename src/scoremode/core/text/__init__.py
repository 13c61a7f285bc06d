"""Turns text into tokens: corpora, documents, tokenizers."""
