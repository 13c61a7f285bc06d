"""Final hidden states ─▶ columns: one definition, several kernels, the same for every engine."""
