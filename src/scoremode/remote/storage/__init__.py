"""Files behind URIs: their file systems, their copies in the cache, and the lock of whoever writes."""
