"""Files behind URIs: their file systems, copies of them in the cache, and folders that one process writes at a time."""
