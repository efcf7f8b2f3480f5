"""Tests of the archive of files."""
