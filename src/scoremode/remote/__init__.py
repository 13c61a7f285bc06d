"""Files behind URIs: their file systems, their copies in the cache, and folders that one process writes at a time."""
