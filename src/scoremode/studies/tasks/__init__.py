"""Runs tasks of lm-evaluation-harness on any engine of scoremode."""
