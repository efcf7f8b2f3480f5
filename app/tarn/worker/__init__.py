"""The background process: finds work, claims it, runs it."""
