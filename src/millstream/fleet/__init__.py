"""The command line and the local cluster."""
