"""Files of this machine: written whole, hashed, locked, checksummed, sealed; and what they are called."""
