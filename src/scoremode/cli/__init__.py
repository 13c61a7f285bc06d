"""The command line: thin, one file per group of verbs. Heavy modules are imported only when they are needed."""
