"""Final hidden states ─▶ columns. There is one definition and several kernels, the same for every engine."""
