"""Models by the names that people already have: those of GGUF files on the hub, and Ollama's."""
