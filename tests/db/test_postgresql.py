"""Table sizes and settings on PostgreSQL, as described in docs/postgresql.md."""

import json
from collections.abc import Callable

import pytest
from sqlalchemy import Connection, text
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.journal.segments import purge_done
from tarn.model.datasets.snapshot import Snapshot

from tests.in_process_api import InProcessApi

pytestmark = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)

ROUNDS, ENTITIES = 5, 1_500


def vacuum(database: Database) -> None:
    """Vacuum the journal as autovacuum does, without truncating free space at a table's end, which concurrent writers
    would keep.
    """
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for table in ("journal", "journal_batches"):
            connection.execute(text(f"VACUUM (TRUNCATE false) {table}"))


def measured(connection: Connection) -> dict[str, int]:
    connection.execute(text("SELECT pg_stat_force_next_flush(), pg_stat_clear_snapshot()"))
    sizes = text("SELECT relname, pg_total_relation_size(relid) FROM pg_stat_user_tables WHERE relname LIKE 'journal%'")
    return {row.relname: row[1] for row in connection.execute(sizes)}


def test_size_of_the_journal_depends_on_unflushed_events_and_not_on_former_segments(
    api: InProcessApi, dataset: Dataset, flush: Callable[[], list[Snapshot]]
):
    database = api.services.database
    sizes = []
    for round_number in range(ROUNDS):
        entities = (
            {"id": f"{round_number}-{each}", "schema": "Person", "properties": {"name": [f"Jane {each}"]}}
            for each in range(ENTITIES)
        )
        body = "".join(f"{json.dumps(entity)}\n" for entity in entities)
        response = api.admin.post(
            "/v1/datasets/test/entities", content=body, headers={"Content-Type": "application/x-ndjson"}
        )
        assert response.status_code in (200, 201), response.text
        with database.read() as connection:
            sizes.append(measured(connection))
        assert len(flush()) == 1
        purge_done(database)
        with database.read() as connection:
            assert connection.execute(text("SELECT count(*) FROM journal")).scalar_one() == 0
        vacuum(database)

    # Each measured with one segment, which reuses the space of the one before; an index may have split a page more.
    first, last = sizes[0], sizes[-1]
    assert first["journal"] > 300_000
    assert last["journal"] <= 1.5 * first["journal"]
    assert last["journal_batches"] <= first["journal_batches"] + (64 << 10)


def test_update_of_a_head_is_within_its_page(api: InProcessApi, dataset: Dataset):
    database = api.services.database
    count = text("SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'journal_head'")
    with database.read() as connection:
        size = measured(connection)["journal_head"]
    with database.engine.connect() as connection:
        for number in range(300):
            connection.execute(text('UPDATE journal_head SET "commit" = :number'), {"number": number})
            # A session reports its statistics at the end of a transaction.
            connection.execute(text("SELECT pg_stat_force_next_flush()"))
            connection.commit()
        after = measured(connection)["journal_head"]
        changed, within = connection.execute(count).one()

    assert changed >= 300
    assert within >= 0.95 * changed
    assert after <= size + (64 << 10)


def test_tables_have_the_documented_settings(database: Database):
    with database.read() as connection:
        rows = connection.execute(
            text("SELECT relname, reloptions FROM pg_class WHERE relkind = 'r' AND reloptions IS NOT NULL")
        )
        options = {row.relname: dict(each.split("=") for each in row.reloptions) for row in rows}

    heads = {"journal_head", "event_heads", "queue_heads", "snapshot_heads", "readers", "workers"}
    assert options.keys() >= heads | {"journal", "journal_batches"}
    assert options["journal"]["autovacuum_vacuum_scale_factor"] == "0"
    assert options["journal"]["autovacuum_vacuum_threshold"] == "100000"
    assert "fillfactor" not in options["journal"]
    assert {options[each]["fillfactor"] for each in heads} == {"20"}
