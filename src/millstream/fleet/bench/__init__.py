"""`millstream bench`: load on a fleet, and what its clients see of it."""
