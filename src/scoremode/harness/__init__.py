"""Tasks: lm-evaluation-harness on any engine of scoremode."""
