"""DuckDB: in this process for point lookups, in a low-priority process for queries."""
