"""Request bodies: decompressed, limited, passed to threads, and parsed as forms."""
