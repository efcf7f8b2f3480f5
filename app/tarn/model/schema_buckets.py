"""Buckets: families of schemata, the first part of the store's key. What is read together lies together."""

from followthemoney import model
from followthemoney.schema import Schema

FAMILIES = (("Page", "page"), ("Document", "document"), ("Interval", "interval"), ("Thing", "thing"))
"""The first that a schema is a kind of."""

OTHER = "other"


def buckets() -> dict[str, str]:
    """Every schema that FtM knows, with its family."""
    return {schema.name: _bucket(schema) for schema in model.schemata.values()}


def _bucket(schema: Schema) -> str:
    return next((bucket for family, bucket in FAMILIES if schema.is_a(family)), OTHER)
