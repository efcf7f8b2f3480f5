"""Parse bodies in child processes and collect their records into chunks."""
