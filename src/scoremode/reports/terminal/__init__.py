"""Tables for a terminal, one file per verb."""
