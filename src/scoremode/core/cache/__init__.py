"""The cache folder: its entries and its size limit."""
