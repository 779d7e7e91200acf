"""The simple forms of the tutorials: `/chat` and `/generate`."""
