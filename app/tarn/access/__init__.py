"""Authentication and authorization: tenants, API keys, grants, limits, audit log."""
