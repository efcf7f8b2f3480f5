"""Worker process: claims jobs, queue items and webhook deliveries, and runs them in the background."""
