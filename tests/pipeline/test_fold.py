"""The kernel's fold against a model that applies one event at a time."""

import random
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from tarn.access.audit import AuditedAction
from tarn.datasets.registry import Dataset
from tarn.journal.batches import Batch
from tarn.journal.parsing.event_buffer import Events
from tarn.lake.commit import SnapshotPublisher
from tarn.lake.live.reference import Event, Statement, fold
from tarn.model.datasets.snapshot import Snapshot
from tarn.model.ftm.statement import StatementRow, statement_id
from tarn.model.tenant import ADMIN
from tarn.pipeline.jobs.flush import Flush

from tests.in_process_api import InProcessApi
from tests.lake.manifests import dataset_of
from tests.pipeline.history import HISTORIES, Expected, head, rows_of, shown, stored
from tests.pipeline.kernels import DirectKernels

ENTITIES = ("a", "b", "c")
ORIGINS = ("crawl", "mapping:x", "by.hand")
SCHEMATA = ("Person", "LegalEntity", "Document")


def drawn(draw: random.Random) -> dict[str, Any]:
    """Draw an event, of few entities and values, so that events overlap."""
    entity, origin = draw.choice(ENTITIES), draw.choice(ORIGINS)
    kind = draw.choices((1, 2, 3), (8, 2, 1))[0]
    prop, value = draw.choice((("name", "x"), ("name", "y"), ("id", "checksum-1"), ("id", "checksum-2")))
    moment = draw.randrange(1, 100)
    return {
        "kind": kind,
        "id": None if kind == 3 else statement_id("test", entity, prop, value),
        "entity_id": draw.choice((entity, entity, entity, None)) if kind == 3 else entity,
        "origin": draw.choice((origin, None)) if kind == 3 else origin,
        "schema": draw.choice(SCHEMATA),
        "prop": prop,
        "value": value,
        "lang": None,
        "original_value": draw.choice((None, None, "X")),
        "canonical_id": draw.choice((None, None, "canonical")),
        "first_seen": moment,
        "last_seen": moment + draw.randrange(10),
    }


def as_events(history: list[dict[str, Any]]) -> Events:
    events = Events()
    for event in history:
        if event["kind"] == 1:
            columns = {name: event[name] for name in event if name != "kind"}
            events.add_statement(StatementRow(external=False, **columns))
        elif event["kind"] == 2:
            events.delete(event["id"], event["entity_id"], event["origin"])
        else:
            events.erase(event["entity_id"], event["origin"])
    return events


def as_folded(batch: list[dict[str, Any]], commit: int) -> list[Event]:
    """Return the events as `tarn.lake.live.reference` takes them."""
    return [
        Event(
            ord=(commit << 32) + position,
            kind=event["kind"],
            entity_id=event["entity_id"],
            origin=event["origin"],
            id=event["id"],
            statement=None if event["kind"] != 1 else _statement(event),
        )
        for position, event in enumerate(batch)
    ]


def _statement(event: dict[str, Any]) -> Statement:
    named = event | {"external": False, "canonical_id": event["canonical_id"] or event["entity_id"]}
    return Statement(**{name: named[name] for name in Statement._fields})


@pytest.mark.parametrize("seed", HISTORIES)
def test_flushed_history_equals_events_applied_one_by_one(
    api: InProcessApi, dataset: Dataset, flush: Callable[[], list[Snapshot]], seed: int
):
    draw = random.Random(seed)
    expected = Expected()
    happened: list[Event] = []
    commits = count(1)
    for _ in range(4):
        consumed = 0
        for _ in range(draw.randrange(1, 5)):
            batch = [drawn(draw) for _ in range(draw.randrange(1, 6))]
            act = AuditedAction(None, "add_statements", "test", "r")
            api.services.writer.submit(Batch(dataset, ADMIN, act), as_events(batch)).result(30)
            expected.commit(batch)
            happened += as_folded(batch, next(commits))
            consumed += len(batch)
        (snapshot,) = flush()

        rows = snapshot.rows
        live = stored(api.services.store, dataset, head(api, dataset))
        assert shown(live) == shown(expected.live)
        assert rows.live == len(live)
        assert rows.added + rows.seen + rows.deleted + rows.set_aside == consumed
        one_by_one = fold({}, happened)
        assert {identity: one._asdict() for identity, one in one_by_one.items()} == {
            identity: {name: row[name] for name in Statement._fields} for identity, row in live.items()
        }


@pytest.mark.parametrize("seed", range(8))
def test_append_only_fold_writes_the_same_rows_as_the_general_fold(
    api: InProcessApi, kernels: DirectKernels, seed: int
):
    """Flush the same adds twice: to an empty dataset, and with another event that excludes the append-only fold."""
    draw = random.Random(seed)
    services = api.services
    rows_by_fold = {}
    batches = [[add_of(draw) for _ in range(draw.randrange(5, 30))] for _ in range(draw.choice((1, 1, 3)))]
    for name in ("plain", "other"):
        api.dataset(name)
        dataset = dataset_of(services.database, name)
        for batch in batches:
            act = AuditedAction(None, "add_statements", name, "r")
            services.writer.submit(Batch(dataset, ADMIN, act), as_events(batch)).result(30)
        if name == "other":
            nothing = Events()
            nothing.erase("nobody", None)
            services.writer.submit(
                Batch(dataset, ADMIN, AuditedAction(None, "delete_entity", name, "r")), nothing
            ).result(30)
        publisher = SnapshotPublisher(services.database, services.store, services.settings, "tester")
        done = Flush(services.database, services.store, publisher, lambda: kernels).run([dataset], lambda: None)
        (snapshot,) = done[dataset.id].snapshots
        rows = rows_of(services.store, dataset, snapshot, "statements")
        log = rows_of(services.store, dataset, snapshot, "translog")
        rows_by_fold[name] = rows, log, snapshot.rows.added, snapshot.rows.seen

    assert rows_by_fold["plain"] == rows_by_fold["other"]


def add_of(draw: random.Random) -> dict[str, Any]:
    """Draw an add that the append-only fold accepts: one origin, no separate canonical id."""
    event = drawn(draw)
    while event["kind"] != 1:
        event = drawn(draw)
    schema = "Document" if event["entity_id"] == "c" else draw.choice(("Person", "LegalEntity"))
    return event | {"origin": "crawl", "canonical_id": None, "schema": schema}
