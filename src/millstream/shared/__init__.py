"""The protocol: all that API pods and workers both know."""
