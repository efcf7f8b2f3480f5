"""Delta tables, snapshots and the fold: what is live."""
