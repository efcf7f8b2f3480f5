"""Input files: formats, compression, YAML, and upload."""
