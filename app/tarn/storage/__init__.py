"""Object storage: the store, the paths of the lake on it, and versioned documents."""
