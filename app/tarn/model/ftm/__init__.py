"""FollowTheMoney's entities and statements, mappings, and queries over them."""
