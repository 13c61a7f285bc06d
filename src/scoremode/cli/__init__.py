"""The command line: thin, one file a verb, nothing heavy imported before it is needed."""
