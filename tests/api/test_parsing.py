"""Large bodies parsed in child processes: the same rows and problems as in a thread, and no leftovers
after failures.
"""

import io
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from tarn.errors import BodyTooLarge, InvalidFormat, SchemaViolation, Unavailable
from tarn.journal.formats.record import ByteSource
from tarn.journal.parsing import parser_pool
from tarn.journal.parsing.event_buffer import SCHEMA
from tarn.journal.parsing.event_chunks import BodyReader, ReadOptions
from tarn.journal.parsing.parser_pool import BYTES_PER_CPU, BodyParser, ParserPool
from tarn.model.ftm.entity import Exploder
from tarn.model.names import DatasetName

from tests.in_process_api import InProcessApi
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


def read_options(records: str, media_type: str, skip: bool = False) -> ReadOptions:
    return ReadOptions(
        records=records,
        media_type=media_type,
        dataset=DatasetName("test"),
        origin=None,
        moment=1_700_000_000_000_000,
        longest=1 << 20,
        on_error="skip" if skip else "abort",
    )


@pytest.fixture(scope="module")
def parsers() -> Iterator[ParserPool]:
    with closing(ParserPool(2, memory=400 << 20, wait=120)) as parsers:
        yield parsers


@pytest.fixture
def own_parsers() -> Iterator[ParserPool]:
    """Return parser processes of the test's own, which it may kill."""
    with closing(ParserPool(2, wait=120)) as parsers:
        yield parsers


def fork_server(parsers: ParserPool) -> psutil.Process:
    assert parsers._server is not None
    return psutil.Process(parsers._server.pid)


def children_of(parsers: ParserPool) -> list[psutil.Process]:
    """Return the parser processes, without zombies that are not reaped yet."""
    return fork_server(parsers).children()


def next_child(parsers: ParserPool) -> psutil.Process:
    """Return the child that will be used next."""
    with parsers.parser(read_options("entities", "application/x-ndjson")) as reading:
        read(reading, io.BytesIO(lines(1)))
    return psutil.Process(reading._process.pid)


def read(reading: BodyParser, source: ByteSource) -> tuple[pa.Table, int, int, int, list]:
    tables = [chunk.table(7, 3) for chunk in reading.chunks(source)]
    faults = [(fault.line, fault.field, fault.reason) for fault in reading.report.errors]
    table = pa.Table.from_batches(tables, SCHEMA)
    return table, reading.entities, reading.statements, reading.report.rejected, faults


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
def test_child_parses_a_body_like_a_thread(parsers: ParserPool, records: str, media_type: str, body: bytes):
    options = read_options(records, media_type, skip=True)

    with parsers.parser(options) as reading:
        result = read(reading, io.BytesIO(body))

    assert result == read(BodyReader(options, Exploder()), io.BytesIO(body))


@pytest.mark.parametrize(
    ("media_type", "body", "error"),
    [
        ("application/x-ndjson", lines(25_000) + b'{"id": "x", "schema": "Banana"}\n' + lines(10), SchemaViolation),
        ("application/json", b"[" + b",\n".join(lines(10).splitlines()), InvalidFormat),
    ],
    ids=["record", "form"],
)
def test_child_reports_errors_like_a_thread_and_is_reused(
    parsers: ParserPool, media_type: str, body: bytes, error: type[SchemaViolation | InvalidFormat]
):
    options = read_options("entities", media_type)

    pid = next_child(parsers).pid

    with pytest.raises(error) as raised, parsers.parser(options) as reading:
        read(reading, io.BytesIO(body))
    with pytest.raises(error) as expected:
        read(BodyReader(options, Exploder()), io.BytesIO(body))

    assert (raised.value.detail, raised.value.members) == (expected.value.detail, expected.value.members)
    assert next_child(parsers).pid == pid


class Interrupted:
    """A body during whose second half an action is run."""

    def __init__(self, action: Callable[[], object]) -> None:
        self._halves = iter([lines(25_000), lines(25_000)])
        self._started = False
        self._action = action

    def read(self, size: int, /) -> bytes:
        if self._started:
            self._action()
        self._started = True
        return next(self._halves, b"")


def test_child_is_reused_after_a_body_that_breaks_off(parsers: ParserPool):
    def disconnect() -> None:
        raise ConnectionResetError

    options, pid = read_options("entities", "application/x-ndjson"), next_child(parsers).pid
    with pytest.raises(ConnectionResetError), parsers.parser(options) as reading:
        read(reading, Interrupted(disconnect))
    with parsers.parser(options) as abandoned:
        next(abandoned.chunks(io.BytesIO(lines(60_000))))

    with parsers.parser(options) as reading:
        result = read(reading, io.BytesIO(lines(5)))

    assert result[:3] == read(BodyReader(options, Exploder()), io.BytesIO(lines(5)))[:3]
    assert next_child(parsers).pid == pid


def test_concurrent_bodies_have_a_child_each_and_one_more_is_unavailable(
    parsers: ParserPool, monkeypatch: pytest.MonkeyPatch
):
    options = read_options("entities", "application/x-ndjson")
    with parsers.parser(options) as first, parsers.parser(options) as second:
        monkeypatch.setattr(parsers, "_wait", 0.01)
        with pytest.raises(Unavailable) as refused, parsers.parser(options):
            pass
        result = [read(reading, io.BytesIO(lines(20_000))) for reading in (first, second)]
        count = len(children_of(parsers))

    assert (refused.value.status, refused.value.retryable, refused.value.retry_after) == (503, True, 2)
    assert result[0] == result[1]
    assert count == 2


def test_wait_for_the_fork_server_is_limited(own_parsers: ParserPool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(own_parsers, "_wait", 0.01)
    with (
        pytest.raises(Unavailable, match=r"within 0\.01 seconds"),
        own_parsers.parser(read_options("entities", "text/csv")),
    ):
        pass
    starting = fork_server(own_parsers).pid
    monkeypatch.setattr(own_parsers, "_wait", 120)
    next_child(own_parsers)
    assert fork_server(own_parsers).pid == starting


def test_body_whose_child_is_killed_is_unavailable_and_the_next_body_is_read(parsers: ParserPool):
    child = next_child(parsers)
    options = read_options("entities", "application/x-ndjson")

    with pytest.raises(Unavailable), parsers.parser(options) as reading:
        read(reading, Interrupted(lambda: os.kill(child.pid, signal.SIGKILL)))

    assert next_child(parsers).pid != child.pid


def test_idle_child_that_was_killed_is_replaced(parsers: ParserPool):
    child = next_child(parsers)
    child.kill()
    wait_until(lambda: child.status() == psutil.STATUS_ZOMBIE)
    assert next_child(parsers).pid != child.pid


def test_killed_fork_server_ends_its_children_and_is_replaced(parsers: ParserPool):
    child, server = next_child(parsers), fork_server(parsers)
    server.kill()
    psutil.wait_procs([child])
    assert next_child(parsers).pid != child.pid
    assert fork_server(parsers).pid != server.pid


def test_body_that_exceeds_the_memory_limit_is_too_large_and_the_next_one_is_read(parsers: ParserPool):
    child = next_child(parsers)
    options = read_options("entities", "application/json").model_copy(update={"longest": 1 << 30})
    # One entity of many small strings, each byte of which takes forty bytes of memory and more.
    body = b'[{"id": "a", "schema": "Person", "properties": {"name": [' + b'"a1",' * 12_000_000 + b'"b"]}}]'

    with pytest.raises(BodyTooLarge) as refused, parsers.parser(options) as reading:
        read(reading, io.BytesIO(body))

    assert refused.value.members == {"limit": 400 << 20}
    assert str(400 << 20) in refused.value.detail
    assert next_child(parsers).pid != child.pid


def test_body_that_exceeds_the_time_limit_is_refused_and_the_next_one_is_read():
    file, row = io.BytesIO(), {"entity_id": "", "schema": "Person", "prop": "name", "value": "Jane"}
    # Near the most rows that a body may have whose size adds nothing to the time limit: several seconds of work.
    table = pa.table({name: pa.repeat(value, 850_000) for name, value in row.items()})
    parquet.write_table(table.replace_schema_metadata({"padding": "x" * 9_000}), file)
    assert len(file.getvalue()) < BYTES_PER_CPU
    options = read_options("statements", "application/vnd.apache.parquet", skip=True)

    with closing(ParserPool(2, cpu=0, wait=120)) as parsers:
        child = next_child(parsers)
        with (
            pytest.raises(InvalidFormat, match="takes more than 0 seconds of CPU time"),
            parsers.parser(options) as reading,
        ):
            read(reading, io.BytesIO(file.getvalue()))
        assert next_child(parsers).pid != child.pid


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT])
def test_body_that_crashes_its_parser_is_refused_permanently(parsers: ParserPool, number: signal.Signals):
    child = next_child(parsers)
    with (
        pytest.raises(InvalidFormat, match=number.name),
        parsers.parser(read_options("entities", "application/x-ndjson")) as reading,
    ):
        read(reading, Interrupted(lambda: os.kill(child.pid, number)))


def test_wait_for_an_unresponsive_child_is_limited(parsers: ParserPool, monkeypatch: pytest.MonkeyPatch):
    child = next_child(parsers)
    monkeypatch.setattr(parser_pool, "WALL_PER_CPU", 0.001)
    with (
        pytest.raises(Unavailable, match="timed out after"),
        parsers.parser(read_options("entities", "application/x-ndjson")) as reading,
    ):
        read(reading, Interrupted(child.suspend))
    assert child not in children_of(parsers)


def test_child_killed_during_a_request_stores_nothing_and_the_next_request_is_answered(api: InProcessApi):
    api.dataset("test")
    child = next_child(api.services.parsers)
    body = lines(100_000)
    responses = []
    writing = threading.Thread(target=lambda: responses.append(api.admin("POST", PATH, content=body, headers=NDJSON)))

    writing.start()
    wait_until(lambda: journal.batches(api))
    child.kill()
    writing.join()
    stored = (journal.count(api), journal.batches(api))
    again = api.admin("POST", PATH, content=lines(5000), headers=NDJSON)

    assert (responses[0].status_code, responses[0].json()["type"]) == (503, "/problems/unavailable")
    assert stored == (0, [])
    assert api.admin.get("/v1/whoami").json()["limits"]["used_statements"] == again.json()["statements"] == 15_000


def test_children_end_when_the_parsers_are_closed_and_none_is_started_after(own_parsers: ParserPool):
    child, server = next_child(own_parsers), fork_server(own_parsers)

    own_parsers.close()

    with pytest.raises(Unavailable), own_parsers.parser(read_options("entities", "application/x-ndjson")):
        pass
    assert psutil.wait_procs([child, server], timeout=30)[1] == []


def test_close_wakes_requests_that_wait_for_a_child(own_parsers: ParserPool):
    child, raised = next_child(own_parsers), []

    def body() -> None:
        try:
            with own_parsers.parser(read_options("entities", "application/x-ndjson")) as reading:
                read(reading, Interrupted(child.suspend))
        except Unavailable as error:
            raised.append(error)

    reader = threading.Thread(target=body)
    reader.start()
    wait_until(lambda: child.status() == psutil.STATUS_STOPPED)
    own_parsers.close()
    reader.join(30)

    assert (reader.is_alive(), len(raised)) == (False, 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.long)])
def test_children_are_gone_after_the_server_however_it_ends(tmp_path: Path, number: int):
    with running(tmp_path, "serve") as server:
        (process,) = (
            child
            for child in psutil.Process(server.process.pid).children()
            if "tarn.journal.parsing.parser_process" in child.cmdline()
        )
        client = server.client()
        client.post("/v1/datasets", json={"name": "test"}).raise_for_status()
        client.timeout = 120
        client.post(PATH, content=lines(1000), headers=NDJSON).raise_for_status()
        (child,) = process.children()

        server.stop(number)

        assert psutil.wait_procs([child, process], timeout=30)[1] == []
