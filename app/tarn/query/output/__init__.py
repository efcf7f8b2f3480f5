"""Convert live rows to entities and to the formats that are sent."""
