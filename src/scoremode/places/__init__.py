"""Files that lie elsewhere: URIs, the file systems behind them, and objects that are read and written whole."""
