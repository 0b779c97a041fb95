"""Selection of the largest entries."""
