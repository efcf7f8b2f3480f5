"""Fetch files from the web, from object stores and from local folders."""
