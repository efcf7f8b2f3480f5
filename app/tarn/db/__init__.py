"""The SQL database: engine, tables, transactions."""
