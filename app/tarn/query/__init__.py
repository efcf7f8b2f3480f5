"""Reads: DuckDB queries over the data files of a snapshot and the unflushed journal."""
