"""The cache folder: its entries, its size limit, and the tokens of long texts that are stored in it."""
