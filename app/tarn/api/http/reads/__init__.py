"""Reads of a dataset: their parameters, time limits and scheduling."""
