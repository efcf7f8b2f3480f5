"""Tasks of the pipeline, on the executors' side: light to import."""
