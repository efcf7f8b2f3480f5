"""Packs: their content, lookups in them, and their deletion."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import func, insert, select, update
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.db.tables import journal, journal_batches, journal_packs
from tarn.journal import batch_contents, batches, packs, segments
from tarn.journal.expiry import sweep
from tarn.journal.packs import DamagedPack, Pack, concerning, encode, within
from tarn.journal.rejected import COLUMNS
from tarn.model.datasets.shards import shard_of
from tarn.model.ids import now

from tests.in_process_api import InProcessApi
from tests.journal.convert_to_packs import as_batch, pack_rows

pytestmark = pytest.mark.both_databases

COUNT = 50
PEOPLE = [{"id": f"e{each}", "schema": "Person", "properties": {"name": [f"Name {each}"]}} for each in range(COUNT)]


def event(entity: str, **values: Any) -> dict[str, Any]:
    given = {"kind": 1, "shard_key": shard_of(entity), "id": b"\1" * 20, "entity_id": entity, "schema": "Person"}
    return given | {"prop": "name", "value": entity, "origin": "crawl", "first_seen": 1, "last_seen": 2} | values


def as_pack(row: dict[str, Any], commit: int = 3) -> Pack:
    return Pack(row["batch"], commit, row["position"], row["rows"], row["checksum"], row["data"])


@pytest.fixture
def small_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "ROWS", 8)


def write(api: InProcessApi) -> None:
    assert api.admin.post("/v1/datasets/test/entities?origin=crawl", PEOPLE).status_code == 200


def count_packs(database: Database) -> tuple[int, int, int]:
    with database.read() as connection:
        batch_ids = connection.execute(select(journal_batches.c.id)).all()
        return (
            len(connection.execute(select(journal.c.batch)).all()),
            len(connection.execute(select(journal_packs.c.batch)).all()),
            len(batch_ids),
        )


# Content


def test_packs_contain_every_event_once_in_ordered_ranges_of_shards_and_entities(small_packs: None):
    events = [event(f"e{number % 20}", value=str(number)) for number in range(60)]

    rows = encode(as_batch(events), 7, 100).to_pylist()

    opened = [as_pack(row).decode() for row in rows]
    unpacked = [one for some in opened for one in some.to_pylist()]
    assert [one["ord"] for one in unpacked] == [(3 << 32) + position for position in range(100, 160)]
    for entity in {one["entity_id"] for one in events}:
        expected = [one["value"] for one in events if one["entity_id"] == entity]
        assert [one["value"] for one in unpacked if one["entity_id"] == entity] == expected
    assert {one["value"] for one in unpacked} == {one["value"] for one in events}
    assert [(row["low"], row["high"]) for row in rows] == [
        (some.column("shard_key")[0].as_py(), some.column("shard_key")[-1].as_py()) for some in opened
    ]
    assert len(rows) == 8
    assert not any(row["has_canonical"] for row in rows)


def test_packs_of_long_texts_have_fewer_events(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packs, "BYTES", 10_000)
    rows = encode(as_batch([event(f"e{number}", value="x" * 1000) for number in range(100)]), 7, 0).to_pylist()

    assert len(rows) > 10
    assert sum(row["rows"] for row in rows) == 100


def test_range_of_shards_and_entities_with_their_referents_is_found():
    events = [event(f"e{number}") for number in range(40)] + [event("other", canonical_id="e3")]
    (row,) = encode(as_batch(events), 7, 0).to_pylist()
    assert row["has_canonical"]
    opened = as_pack(row).decode()

    some = within(opened, 1000, 30_000).column("entity_id").to_pylist()
    named = concerning(opened, {shard_of("e3")}, {"e3"}).column("entity_id").to_pylist()

    assert set(some) == {one["entity_id"] for one in events if 1000 <= one["shard_key"] <= 30_000}
    assert 0 < len(some) < len(events)
    assert set(named) == {"e3", "other"}


def test_event_that_concerns_every_entity_is_not_packed():
    with pytest.raises(ValueError, match="every entity"):
        encode(as_batch([event("a"), {"kind": 3, "origin": "crawl"}]), 7, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"data": b""},
        {"data": b"x" * 500},
        {"data": b"no Arrow", "checksum": 3_313_171_436},
        {"rows": 2},
        {"checksum": 1},
    ],
)
def test_changed_pack_raises_an_error(change: dict[str, Any]):
    (row,) = encode(as_batch([event("a")]), 7, 40).to_pylist()
    assert as_pack(row).decode().num_rows == 1

    with pytest.raises(DamagedPack, match=r"the events 40 to 4[01] of the journal's batch 7 cannot be read"):
        as_pack(row | change).decode()


def test_every_changed_byte_of_a_pack_is_detected():
    (row,) = encode(as_batch([event(f"e{number}") for number in range(20)]), 7, 0).to_pylist()
    for place in range(0, len(row["data"]), 7):
        data = bytearray(row["data"])
        data[place] ^= 1
        with pytest.raises(DamagedPack):
            as_pack(row | {"data": bytes(data)}).decode()


# In the database


def test_events_in_packs_have_the_same_positions_and_counts_as_rows(
    api: InProcessApi, dataset: Dataset, small_packs: None
):
    write(api)
    database = api.services.database

    def read_events() -> tuple[set[Any], int]:
        with database.read() as connection:
            uid, rows = connection.execute(select(journal_batches.c.uid, batch_contents.event_count())).one()
            everything = batch_contents.events_at(connection, uid, range(rows), COLUMNS)
            one = batch_contents.events_at(connection, uid, [17], COLUMNS)
        assert one == {17: everything[17]}
        named = [dict(zip(COLUMNS, values, strict=True)) for values in everything.values()]
        return {(bytes(one["id"]), _text(one["entity_id"]), _text(one["value"])) for one in named}, rows

    before = read_events()
    pack_rows(database)

    assert count_packs(database)[:2] == (0, 13)
    assert read_events() == before


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


@pytest.mark.parametrize("most", [10, 65_536])
def test_packs_of_a_finished_batch_are_deleted_in_small_steps(
    api: InProcessApi, dataset: Dataset, small_packs: None, monkeypatch: pytest.MonkeyPatch, most: int
):
    monkeypatch.setattr(batch_contents, "PURGE_PACKED", most)
    monkeypatch.setattr(segments, "PURGE_ROWS", most)
    write(api)
    database = api.services.database
    pack_rows(database)
    with database.write() as connection:
        connection.execute(update(journal_batches).values(state="done"))

    segments.purge_done(database)

    assert count_packs(database) == (0, 0, 0)


def test_packs_of_an_abandoned_part_are_deleted(api: InProcessApi, dataset: Dataset, small_packs: None):
    write(api)
    database, settings = api.services.database, api.services.settings
    pack_rows(database)
    long_ago = now() - timedelta(days=9)
    with database.write() as connection:
        connection.execute(
            update(journal_batches).values(state=batches.OPEN, commit=None, segment=None, expires=long_ago)
        )

    sweep(database, settings)

    assert count_packs(database) == (0, 0, 0)


def test_unreadable_pack_stops_reads_and_flushes_and_nothing_is_lost(
    api: InProcessApi, dataset: Dataset, small_packs: None, kernels: Any
):
    write(api)
    database = api.services.database
    pack_rows(database)
    with database.write() as connection:
        last = journal_packs.c.position == connection.execute(select(func.max(journal_packs.c.position))).scalar_one()
        (sound,) = connection.execute(select(journal_packs.c.data).where(last)).scalars()
        connection.execute(update(journal_packs).where(last).values(data=bytes(sound)[:-9] + b"\0" * 9))
        before = connection.execute(select(journal_packs)).all()

    answer = api.admin.get("/v1/datasets/test/entities")
    done = _flushed(api, dataset, kernels)

    assert (answer.status_code, answer.json()["type"]) == (500, "/problems/internal")
    assert done.error is not None
    assert "cannot be read" in str(done.error)
    with database.write() as connection:
        assert connection.execute(select(journal_packs)).all() == before
        connection.execute(update(journal_packs).where(last).values(data=sound))
    (snapshot,) = _flushed(api, dataset, kernels).snapshots
    assert snapshot.rows.added == 2 * COUNT


def _flushed(api: InProcessApi, dataset: Dataset, kernels: Any) -> Any:
    from tarn.lake.commit import SnapshotPublisher
    from tarn.pipeline.jobs.flush import Flush

    services = api.services
    publisher = SnapshotPublisher(services.database, services.store, services.settings, "tester")
    return Flush(services.database, services.store, publisher, lambda: kernels).run([dataset], lambda: None)[dataset.id]


def test_rejected_event_in_a_pack_is_stored_and_restored_like_one_in_a_row(
    api: InProcessApi, dataset: Dataset, small_packs: None, flush: Any
):
    write(api)
    database = api.services.database
    with database.write() as connection:
        connection.execute(
            update(journal).where(journal.c.entity_id == "e7", journal.c.prop == "name").values(schema="Nobody")
        )
    pack_rows(database)

    (snapshot,) = flush()

    assert (snapshot.rows.added, snapshot.rows.set_aside) == (2 * COUNT - 1, 1)
    (rejected,) = api.admin.get("/v1/datasets/test/journal/rejected").json()["results"]
    assert (rejected["event"]["entity_id"], rejected["event"]["value"], rejected["reason"]) == (
        "e7",
        "Name 7",
        "schema: is not known",
    )
    assert api.admin.post("/v1/datasets/test/journal/rejected/retry", {}).json()["retried"] == 1


def test_packs_of_an_uncommitted_batch_are_invisible(api: InProcessApi, dataset: Dataset, flush: Any):
    write(api)
    with api.services.database.write() as connection:
        stamp = {"uid": "staged", "state": "staged", "commit": None, "segment": None}
        row = connection.execute(select(journal_batches)).mappings().one()
        batch = connection.execute(
            insert(journal_batches)
            .values({name: value for name, value in row.items() if name != "id"} | stamp)
            .returning(journal_batches.c.id)
        ).scalar_one()
        connection.execute(insert(journal_packs), encode(as_batch([event("unseen")]), batch, 0).to_pylist())

    assert api.admin.get("/v1/datasets/test/entities/unseen").status_code == 404
    (snapshot,) = flush()
    assert snapshot.rows.added == 2 * COUNT
