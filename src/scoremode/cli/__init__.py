"""The command line: thin, one file per verb, nothing heavy imported before it is needed."""
