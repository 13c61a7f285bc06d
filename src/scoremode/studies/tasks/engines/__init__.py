"""Engines that generate the answers of tasks."""
