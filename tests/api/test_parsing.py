"""Large bodies, parsed by a child: the same rows, the same answers, and nothing left of what does not end well."""

import io
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from app.errors import InvalidFormat, SchemaViolation, Unavailable
from app.journal.events import SCHEMA
from app.journal.formats.record import Source
from app.journal.intake import Intake, Terms
from app.journal.parsing import Parsers, Reading
from app.model.entity import Exploder
from app.model.names import DatasetName
from tests.house import House
from tests.journal import journal
from tests.server import running
from tests.waiting import wait_until

NDJSON = {"Content-Type": "application/x-ndjson"}
PATH = "/v1/datasets/test/entities"


def person(number: int) -> dict:
    return {"id": f"p{number}", "schema": "Person", "properties": {"name": [f"Person {number}"], "country": "Germany"}}


def lines(count: int) -> bytes:
    return b"".join(json.dumps(person(number)).encode() + b"\n" for number in range(count))


def statements(count: int) -> list[dict]:
    common = {"schema": "Person", "prop": "name", "dataset": "other", "origin": "crawl", "external": False}
    return [
        {"entity_id": f"p{n}", "value": f"Person {n}", "lang": "eng" if n % 2 else None} | common for n in range(count)
    ]


def csv(rows: list[dict]) -> bytes:
    texts = (f"{row['entity_id']},{row['schema']},{row['prop']},{row['value']},{row['lang'] or ''}" for row in rows)
    return "\n".join(["entity_id,schema,prop,value,lang", *texts]).encode()


def as_parquet(rows: list[dict]) -> bytes:
    file = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(rows), file)
    return file.getvalue()


def as_arrow(rows: list[dict]) -> bytes:
    file, table = io.BytesIO(), pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, 1000)
    return file.getvalue()


def terms(records: str, media_type: str, skip: bool = False) -> Terms:
    return Terms(
        records=records,
        media_type=media_type,
        dataset=DatasetName("test"),
        origin=None,
        moment=1_700_000_000_000_000,
        longest=1 << 20,
        skip=skip,
    )


@pytest.fixture
def parsers() -> Iterator[Parsers]:
    parsers = Parsers(2)
    until_ready(parsers)
    yield parsers
    parsers.close()


def until_ready(parsers: Parsers) -> None:
    """Ask until a child has started: nobody else waits for one."""

    def is_there() -> bool:
        with parsers.reading(terms("entities", "application/x-ndjson")) as reading:
            return not isinstance(reading, Intake)

    wait_until(is_there)


def children(parent: int | None = None) -> list[psutil.Process]:
    return [child for child in psutil.Process(parent).children() if "app.journal.parser" in child.cmdline()]


def read(reading: Reading, source: Source) -> tuple[pa.Table, int, int, int, list]:
    tables = [chunk.table(7, 3) for chunk in reading.chunks(source)]
    faults = [(fault.line, fault.field, fault.reason) for fault in reading.rejected.faults]
    table = pa.Table.from_batches(tables, SCHEMA)
    return table, reading.entities, reading.statements, reading.rejected.count, faults


@pytest.mark.parametrize(
    ("records", "media_type", "body"),
    [
        ("entities", "application/x-ndjson", lines(30_000)),
        ("entities", "application/x-ndjson", b""),
        ("entities", "application/json", json.dumps([person(number) for number in range(3000)], indent=1).encode()),
        ("entities", "application/json+ftm", lines(3) + b"broken\n" + lines(3) + b'{"id": "x"}\n'),
        ("statements", "application/x-ndjson", b"\n".join(json.dumps(row).encode() for row in statements(3000))),
        ("statements", "application/json", json.dumps(statements(3000)).encode()),
        ("statements", "text/csv", csv(statements(60_000))),
        ("statements", "application/vnd.apache.parquet", as_parquet(statements(60_000))),
        ("statements", "application/vnd.apache.arrow.stream", as_arrow(statements(3000))),
    ],
    ids=["ndjson", "nothing", "json", "faults", "statements", "array", "csv", "parquet", "arrow"],
)
def test_child_makes_of_a_body_what_a_thread_makes_of_it(parsers: Parsers, records: str, media_type: str, body: bytes):
    asked = terms(records, media_type, skip=True)

    with parsers.reading(asked) as reading:
        found = read(reading, io.BytesIO(body))

    assert not isinstance(reading, Intake)
    assert found == read(Intake(asked, Exploder()), io.BytesIO(body))


@pytest.mark.parametrize(
    ("media_type", "body", "error"),
    [
        ("application/x-ndjson", lines(25_000) + b'{"id": "x", "schema": "Banana"}\n' + lines(10), SchemaViolation),
        ("application/json", b"[" + b",\n".join(lines(10).splitlines()), InvalidFormat),
    ],
    ids=["record", "form"],
)
def test_what_is_wrong_is_said_as_a_thread_says_it_and_the_child_goes_on(
    parsers: Parsers, media_type: str, body: bytes, error: type[SchemaViolation | InvalidFormat]
):
    asked = terms("entities", media_type)

    with pytest.raises(error) as said, parsers.reading(asked) as reading:
        read(reading, io.BytesIO(body))
    with pytest.raises(error) as expected:
        read(Intake(asked, Exploder()), io.BytesIO(body))
    with parsers.reading(asked) as again:
        pass

    assert (said.value.detail, said.value.members) == (expected.value.detail, expected.value.members)
    assert not isinstance(again, Intake)
    assert len(children()) == 1


class Interrupted:
    """A body whose second half something happens to."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._halves = iter([lines(25_000), lines(25_000)])
        self._begun = False
        self._act = act

    def read(self, size: int, /) -> bytes:
        if self._begun:
            self._act()
        self._begun = True
        return next(self._halves, b"")


def test_body_that_breaks_off_leaves_a_child_that_reads_the_next(parsers: Parsers):
    def leave() -> None:
        raise ConnectionResetError

    asked, pid = terms("entities", "application/x-ndjson"), children()[0].pid
    with pytest.raises(ConnectionResetError), parsers.reading(asked) as reading:
        read(reading, Interrupted(leave))
    with parsers.reading(asked) as given_up:
        next(given_up.chunks(io.BytesIO(lines(60_000))))

    with parsers.reading(asked) as reading:
        found = read(reading, io.BytesIO(lines(5)))

    assert found[:3] == read(Intake(asked, Exploder()), io.BytesIO(lines(5)))[:3]
    assert [child.pid for child in children()] == [pid]


def test_two_bodies_at_once_have_a_child_each_and_a_third_has_a_thread(parsers: Parsers):
    asked = terms("entities", "application/x-ndjson")
    with parsers.reading(asked) as first:
        until_ready(parsers)
        with parsers.reading(asked) as second, parsers.reading(asked) as third:
            sources = [io.BytesIO(lines(20_000)) for _ in range(3)]
            found = [read(reading, source) for reading, source in zip((first, second, third), sources, strict=True)]

    assert found[0] == found[1] == found[2]
    assert [isinstance(reading, Intake) for reading in (first, second, third)] == [False, False, True]
    assert len(children()) == 2


def test_child_killed_midway_is_unavailable_and_the_next_body_is_read(parsers: Parsers):
    (child,) = children()
    asked = terms("entities", "application/x-ndjson")

    with pytest.raises(Unavailable), parsers.reading(asked) as reading:
        read(reading, Interrupted(lambda: os.kill(child.pid, signal.SIGKILL)))
    until_ready(parsers)

    (other,) = children()
    assert other.pid != child.pid


def test_child_killed_amid_a_request_leaves_nothing_and_the_next_request_is_answered(house: House):
    house.dataset("test")
    until_ready(house.services.parsers)
    (child,) = children()
    body = lines(100_000)
    answers = []
    writing = threading.Thread(target=lambda: answers.append(house.admin("POST", PATH, content=body, headers=NDJSON)))

    writing.start()
    wait_until(lambda: journal.batches(house))
    child.kill()
    writing.join()
    kept = (journal.count(house), journal.batches(house))
    again = house.admin("POST", PATH, content=lines(5000), headers=NDJSON)

    assert (answers[0].status_code, answers[0].json()["type"]) == (503, "/problems/unavailable")
    assert kept == (0, [])
    assert house.admin.get("/v1/whoami").json()["limits"]["used_statements"] == again.json()["statements"] == 15_000


def test_children_end_with_their_parsers_and_none_is_started_after(parsers: Parsers):
    (child,) = children()

    parsers.close()

    with parsers.reading(terms("entities", "application/x-ndjson")) as reading:
        assert isinstance(reading, Intake)
    assert (child.is_running(), children()) == (False, [])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_children_are_gone_after_the_server_however_it_ends(tmp_path: Path, number: int):
    with running(tmp_path, "serve") as server:
        client = server.client()
        client.post("/v1/datasets", json={"name": "test"}).raise_for_status()
        client.timeout = 120

        def is_ready() -> bool:
            """Whether a child has started, which nobody looks at but who has a body for it."""
            client.post(PATH, content=lines(1000), headers=NDJSON).raise_for_status()
            return "a parser is ready" in server.log.read_text()

        wait_until(is_ready, 120)
        (child,) = children(server.process.pid)

        server.stop(number)

        assert psutil.wait_procs([child], timeout=30) == ([child], [])
