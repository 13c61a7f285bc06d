"""Engines that write texts."""
