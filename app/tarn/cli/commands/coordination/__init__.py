"""Commands about jobs, events, queues, locks and tags."""
