"""Runs on disk: their folders, manifests and columns, on this machine and behind URIs."""
