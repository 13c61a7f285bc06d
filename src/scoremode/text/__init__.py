"""text ─▶ Tokens: corpora, documents, tokenizers."""
