"""Schema buckets: families of schemata, the first part of the sort key. Entities read together are stored together."""

from followthemoney import model
from followthemoney.schema import Schema

FAMILIES = (("Page", "page"), ("Document", "document"), ("Interval", "interval"), ("Thing", "thing"))
"""Base schemata and their buckets; the first one that a schema descends from applies."""

OTHER = "other"


def buckets() -> dict[str, str]:
    """Return the bucket of every FtM schema."""
    return {schema.name: _bucket(schema) for schema in model.schemata.values()}


def _bucket(schema: Schema) -> str:
    return next((bucket for family, bucket in FAMILIES if schema.is_a(family)), OTHER)
