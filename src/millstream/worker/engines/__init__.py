"""The engines a worker can run, behind one protocol."""
