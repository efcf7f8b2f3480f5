"""The lake: Delta tables, snapshots, the commit protocol, and the fold that defines live statements."""
