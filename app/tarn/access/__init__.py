"""Who calls and what they may do: tenants, keys, grants, limits, audit."""
