"""What commands share: flags, output, progress, the log."""
