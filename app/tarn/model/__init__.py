"""Domain model: value objects without I/O."""
