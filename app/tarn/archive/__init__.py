"""Source files: content-addressed blobs and their records."""
