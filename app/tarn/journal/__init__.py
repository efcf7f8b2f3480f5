"""Journal: the SQL write buffer of datasets. Writing, segment rotation, draining, and the overlay for reads."""
