"""Spark pipeline: the Spark session, the jobs that run on the driver, and the tasks that run on executors."""
