"""Reads: DuckDB over pinned files and the unflushed journal."""
