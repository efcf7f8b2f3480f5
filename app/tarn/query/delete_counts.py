"""Counts and lookups of the live statements that a delete would end, in the current state of a dataset."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from tarn.datasets.registry import Dataset
from tarn.query.reader import NOW, Reading


class StatementLocation(NamedTuple):
    """The entity and origin of a live statement, which a delete of it must name."""

    entity_id: str
    origin: str


class Referent(NamedTuple):
    """The BASE statement that makes an id a referent of an entity, where that id has no other statement."""

    id: bytes
    entity_id: str
    origin: str


def of_entity(reading: Reading, dataset: Dataset, entity_id: str, origin: str | None) -> int:
    """Return how many live statements an entity has, of one origin or of all."""
    reading.entities(dataset, NOW, [entity_id])
    row = reading.duck.execute(
        "SELECT count(*) FROM live WHERE entity_id = $entity AND ($origin IS NULL OR origin = $origin)",
        {"entity": entity_id, "origin": origin},
    ).fetchone()
    assert row is not None
    return int(row[0])


def referents(reading: Reading, dataset: Dataset, ids: Sequence[str], origin: str | None) -> list[Referent]:
    """Return the BASE statements that make other ids referents of these entities.

    A delete must end them together with the entities, which would otherwise stay live without a property.
    """
    reading.entities(dataset, NOW, ids)
    rows = reading.duck.execute(
        "SELECT first(id), entity_id, origin FROM live WHERE entity_id <> canonical_id "
        "AND canonical_id IN (SELECT unnest($ids)) AND ($origin IS NULL OR origin = $origin) "
        "GROUP BY entity_id, origin HAVING bool_and(prop = 'id') ORDER BY ALL",
        {"ids": list(ids), "origin": origin},
    ).fetchall()
    return [Referent(*row) for row in rows]


def of_origin(reading: Reading, dataset: Dataset, origin: str) -> int:
    """Return how many live statements an origin has."""
    reading.everything(dataset, NOW, origin)
    row = reading.duck.execute("SELECT count(*) FROM live WHERE origin = ?", [origin]).fetchone()
    assert row is not None
    return int(row[0])


def of_statement(reading: Reading, dataset: Dataset, statement: bytes, origin: str | None) -> list[StatementLocation]:
    """Return where a statement is live: its entity, once for each origin that has the statement."""
    reading.everything(dataset, NOW, origin)
    return _locations(reading, "id = $value", statement, origin)


def _locations(reading: Reading, where: str, value: Any, origin: str | None) -> list[StatementLocation]:
    rows = reading.duck.execute(
        f"SELECT entity_id, origin FROM live WHERE {where} AND ($origin IS NULL OR origin = $origin) ORDER BY ALL",  # noqa: S608
        {"value": value, "origin": origin},
    ).fetchall()
    return [StatementLocation(*row) for row in rows]
