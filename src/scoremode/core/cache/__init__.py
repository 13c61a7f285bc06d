"""The cache folder: its entries, its size limit, and the tokens and answers that are stored in it."""
