"""What lies on disk: atomic files, locks, journals, runs, references, the cache."""
