"""The verbs that a user runs, one file per verb."""
