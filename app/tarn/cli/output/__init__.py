"""Output of results: tables, streams of records, progress and reports."""
