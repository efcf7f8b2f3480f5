"""Back up, restore and reconcile a lake and its database."""
