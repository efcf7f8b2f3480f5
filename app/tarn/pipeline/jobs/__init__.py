"""Jobs of the Spark pipeline, as they run on the driver: planning, running tasks, publishing."""
