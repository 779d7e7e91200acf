"""The OpenAI wire format: schemas, and pure mappings to and from the protocol."""
