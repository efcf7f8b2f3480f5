"""Responses that are streamed: rows, files and events."""
