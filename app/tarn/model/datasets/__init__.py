"""What a dataset consists of: configuration, journal, snapshots, exports."""
