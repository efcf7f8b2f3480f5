"""Verify, repair and vacuum datasets."""
