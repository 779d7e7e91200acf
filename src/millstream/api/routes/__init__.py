"""The endpoints: each parses, calls and returns."""
