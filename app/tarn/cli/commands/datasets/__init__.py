"""Commands that read and write a dataset's content and metadata."""
