"""The command line: options, progress and what is printed."""
