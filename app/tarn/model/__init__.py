"""Values without I/O: what the rest of the house passes around."""
