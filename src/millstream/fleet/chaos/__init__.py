"""The chaos run: random faults against a fleet of its own, and a check of every promise."""
