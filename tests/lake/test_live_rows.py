"""The live rows of a store: SQL against the reference implementation."""

import random

import duckdb
import pytest
from tarn.lake.live import sql
from tarn.lake.live.reference import Mark, Statement, StoredRow, stored_live

ORIGINS = ("crawl", "mapping:x")
IDS = (b"a" * 20, b"b" * 20, b"c" * 20)


def stored_row(draw: random.Random, id: bytes, origin: str, position: int) -> StoredRow:
    first = draw.randrange(100)
    statement = Statement(
        "canonical", "entity", id, "Person", "name", str(position), None, None, False, origin, first, first + 10
    )
    return StoredRow(statement, position)


def mark(draw: random.Random, id: bytes, origin: str, position: int) -> Mark:
    first = draw.randrange(100)
    return Mark(id, origin, draw.choice(("seen", "seen", "delete")), first, first + 10, position)


def store(draw: random.Random) -> tuple[list[StoredRow], list[Mark]]:
    """Return some rows of each identity, and marks before, between, after and at the same position as them.

    A row and a `delete` have the same position if the statement moved to another key.
    """
    rows, marks = [], []
    positions = iter(draw.sample(range(1_000), 100))
    for id in IDS:
        for origin in ORIGINS:
            own = [stored_row(draw, id, origin, next(positions)) for _ in range(draw.choice((0, 1, 1, 2, 3)))]
            rows += own
            marks += [mark(draw, id, origin, next(positions)) for _ in range(draw.choice((0, 0, 1, 2)))]
            marks += [mark(draw, id, origin, row.ord) for row in own if draw.random() < 0.3]
    draw.shuffle(rows)
    return rows, marks


def store_with_each_statement_once(draw: random.Random) -> tuple[list[StoredRow], list[Mark]]:
    """Return one row of each identity, and marks that do not delete any."""
    identities = [(id, origin) for id in IDS for origin in ORIGINS]
    rows = [stored_row(draw, *identity, draw.randrange(1, 50)) for identity in identities]
    marks = [
        mark(draw, *identity, 50 + position) for position, identity in enumerate(identities) if draw.random() < 0.5
    ]
    return rows, [one._replace(kind="seen") for one in marks]


def query_live(
    rows: list[StoredRow], marks: list[Mark], *, streamed: bool, each_once: bool = False
) -> dict[tuple[bytes, str], tuple[str, int, int, int]]:
    with duckdb.connect() as duck:
        duck.execute(
            "CREATE TABLE stored_rows (id BLOB, origin VARCHAR, value VARCHAR, first_seen BIGINT, last_seen BIGINT, "
            "ord BIGINT)"
        )
        duck.execute(
            "CREATE TABLE translog (id BLOB, origin VARCHAR, kind VARCHAR, first_seen BIGINT, last_seen BIGINT, "
            "ord BIGINT)"
        )
        for statement, position in rows:
            duck.execute(
                "INSERT INTO stored_rows VALUES (?, ?, ?, ?, ?, ?)",
                [*statement.identity, statement.value, statement.first_seen, statement.last_seen, position],
            )
        for one in marks:
            duck.execute("INSERT INTO translog VALUES (?, ?, ?, ?, ?, ?)", list(one))
        identities = "SELECT id, origin, ord FROM stored_rows" if streamed else None
        log = "SELECT * FROM translog" if marks else None
        query = sql.stored_live("SELECT * FROM stored_rows", log, identities, each_once=each_once)
        live = duck.execute(f"SELECT id, origin, value, first_seen, last_seen, ord FROM ({query})").fetchall()
    assert len(live) == len({(id, origin) for id, origin, *_ in live})
    return {(id, origin): tuple(other) for id, origin, *other in live}


def by_reference(rows: list[StoredRow], marks: list[Mark]) -> dict[tuple[bytes, str], tuple[str, int, int, int]]:
    """Return value, times and `ord` of the live statements: the `ord` is that of the last row or mark of each."""
    last = dict.fromkeys(stored_live(rows, marks), 0)
    events = [(row.statement.identity, row.ord) for row in rows] + [((one.id, one.origin), one.ord) for one in marks]
    for identity, position in events:
        if identity in last:
            last[identity] = max(last[identity], position)
    live = stored_live(rows, marks)
    return {identity: (one.value, one.first_seen, one.last_seen, last[identity]) for identity, one in live.items()}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_live_rows_of_a_store_are_those_of_the_reference(seed: int, streamed: bool):
    rows, marks = store(random.Random(seed))
    assert query_live(rows, marks, streamed=streamed) == by_reference(rows, marks)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_live_rows_where_each_statement_has_one_row_are_those_of_the_reference(seed: int, streamed: bool):
    rows, marks = store_with_each_statement_once(random.Random(seed))
    expected = by_reference(rows, marks)
    assert len(expected) == len(rows)
    assert query_live(rows, marks, streamed=streamed, each_once=True) == expected


def test_live_rows_of_a_store_without_marks_are_the_newest():
    rows, _ = store(random.Random(1))
    assert query_live(rows, [], streamed=True) == query_live(rows, [], streamed=False) == by_reference(rows, [])
