"""Coordination between tenants: tags, locks, queue and webhooks."""
