"""What a delete will end, as readers see it at the moment."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from tarn.datasets.registry import Dataset
from tarn.query.reader import NOW, Reading


class StatementLocation(NamedTuple):
    """A live statement, by what a delete of it names."""

    entity_id: str
    origin: str


class Referent(NamedTuple):
    """The BASE statement that makes an id a referent of an entity, where nothing else is said under that id."""

    id: bytes
    entity_id: str
    origin: str


def of_entity(reading: Reading, dataset: Dataset, entity_id: str, origin: str | None) -> int:
    """How many live statements an origin, or every one, has of an entity."""
    reading.entities(dataset, NOW, [entity_id])
    row = reading.duck.execute(
        "SELECT count(*) FROM live WHERE entity_id = $entity AND ($origin IS NULL OR origin = $origin)",
        {"entity": entity_id, "origin": origin},
    ).fetchone()
    assert row is not None
    return int(row[0])


def referents(reading: Reading, dataset: Dataset, ids: Sequence[str], origin: str | None) -> list[Referent]:
    """What makes other ids referents of these entities: it ends with them, or they would live on without a property."""
    reading.entities(dataset, NOW, ids)
    found = reading.duck.execute(
        "SELECT first(id), entity_id, origin FROM live WHERE entity_id <> canonical_id "
        "AND canonical_id IN (SELECT unnest($ids)) AND ($origin IS NULL OR origin = $origin) "
        "GROUP BY entity_id, origin HAVING bool_and(prop = 'id') ORDER BY ALL",
        {"ids": list(ids), "origin": origin},
    ).fetchall()
    return [Referent(*row) for row in found]


def of_origin(reading: Reading, dataset: Dataset, origin: str) -> int:
    """How many live statements an origin has."""
    reading.everything(dataset, NOW, origin)
    row = reading.duck.execute("SELECT count(*) FROM live WHERE origin = ?", [origin]).fetchone()
    assert row is not None
    return int(row[0])


def of_statement(reading: Reading, dataset: Dataset, statement: bytes, origin: str | None) -> list[StatementLocation]:
    """Where a statement is live: its entity, with each origin that says it."""
    reading.everything(dataset, NOW, origin)
    return _locations(reading, "id = $wanted", statement, origin)


def _locations(reading: Reading, where: str, wanted: Any, origin: str | None) -> list[StatementLocation]:
    found = reading.duck.execute(
        f"SELECT entity_id, origin FROM live WHERE {where} AND ($origin IS NULL OR origin = $origin) ORDER BY ALL",  # noqa: S608
        {"wanted": wanted, "origin": origin},
    ).fetchall()
    return [StatementLocation(*row) for row in found]
