"""Everything that is stored on disk: atomic files, locks, journals, runs, references, the cache."""
