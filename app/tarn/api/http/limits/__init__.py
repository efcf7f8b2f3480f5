"""Limits that tenants share: fair semaphores, and thread pools."""
