"""Local files: their names, and how they are written atomically, hashed, locked, checksummed and sealed."""
