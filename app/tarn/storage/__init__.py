"""The object-store port, the layout of the lake on it, and what is written once."""
