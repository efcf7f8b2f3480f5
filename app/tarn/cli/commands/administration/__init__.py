"""Commands about tenants, keys, grants, webhooks, audit and the server's state."""
