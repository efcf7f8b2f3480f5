"""Alembic migrations of the SQL database."""
