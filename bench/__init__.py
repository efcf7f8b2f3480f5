"""Benchmarks: each case is a module with `run() -> dict`, printed as JSON and as a table."""
