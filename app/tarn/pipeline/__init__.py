"""Spark: the session, and one module per job."""
