"""The definition of live rows: which statements of a dataset hold at a snapshot."""
