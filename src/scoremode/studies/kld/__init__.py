"""llama.cpp's files of base logits."""
