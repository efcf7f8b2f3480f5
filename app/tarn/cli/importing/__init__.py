"""Data of others, brought to a server: lakehouse directories and FtM statement packs, read here and sent over HTTP."""
