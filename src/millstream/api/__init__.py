"""The stateless API pod: HTTP in, protocol out."""
