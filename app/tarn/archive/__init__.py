"""The archive: source files as content-addressed blobs, their records, uploads, and the guarded fetcher."""
