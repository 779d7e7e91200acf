"""The command line, a file for each kind of command: options in, exit code out."""
