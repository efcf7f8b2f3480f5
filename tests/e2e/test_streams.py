"""Response streams of a real server: bounded memory, cancelled when the client disconnects, and never truncated
without an error.
"""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tarn.db.engine import Database
from tarn.lake.commit import SnapshotPublisher
from tarn.pipeline.jobs.flush import Flush
from tarn.settings import load_settings
from tarn.storage.connection import Connection
from tarn.storage.store import Store

from tests.lake.manifests import dataset_of
from tests.pipeline.kernels import DirectKernels
from tests.server import Server, running
from tests.waiting import wait_until

ENTITIES = "/v1/datasets/large/entities"
STREAM = f"{ENTITIES}/stream"
STATEMENTS = "/v1/datasets/large/statements"
# The server is slow to fill: one test process starts it for all cases.
pytestmark = [pytest.mark.xdist_group("large"), pytest.mark.long]

MANY = 40_000
TAKE = 64 << 10
MEMORY = 96 << 20
STREAM_TIMEOUT = 2.0


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory, kernel_process: ProcessPoolExecutor) -> Iterator[Server]:
    """Start a server with little memory for queries and 40 000 flushed entities of twelve kilobytes."""
    folder = tmp_path_factory.mktemp("streams")
    (folder / "tmp").mkdir()
    limits = {
        "TARN_QUERY_MEMORY": f"{MEMORY >> 20}m",
        "TARN_QUERY_STREAMS": "1",
        "TARN_STREAM_TIMEOUT": str(STREAM_TIMEOUT),
        "TARN_FLUSH_ROWS": "1000000000",
        "TARN_FLUSH_BYTES": "1000000000000",
    }
    with running(folder, TMPDIR=str(folder / "tmp"), **limits) as server:
        client = server.client()
        assert client.post("/v1/datasets", json={"name": "large"}).status_code == 201
        answer = client.post(
            f"{ENTITIES}?origin=crawl", content=_lines(), headers={"Content-Type": "application/x-ndjson"}, timeout=300
        )
        assert answer.status_code == 200, answer.text
        _flush(folder, kernel_process)
        yield server


def _lines() -> Iterator[bytes]:
    for number in range(MANY):
        name = f"Person number {number * 7919 % MANY}"
        properties = {"name": [name], "country": ["de", "fr"], "notes": [f"{name} " * 600]}
        yield json.dumps({"id": f"p-{number:06d}", "schema": "Person", "properties": properties}).encode() + b"\n"


def _flush(folder: Path, pool: ProcessPoolExecutor) -> None:
    """Flush outside the server, as its worker would with Spark."""
    settings = load_settings(
        database_url=f"sqlite:///{folder}/data/tarn.db",
        lake_uri=str(folder / "data" / "lake"),
        admin_key_file=folder / "data" / "admin.key",
    )
    database, store = Database(settings.database_url), Store(Connection.from_settings(settings))
    dataset = dataset_of(database, "large")
    publisher = SnapshotPublisher(database, store, settings, "tester")
    done = Flush(database, store, publisher, lambda: DirectKernels(settings, pool)).run([dataset], lambda: None)
    assert done[dataset.id].error is None
    database.close()


@pytest.fixture
def client(large: Server) -> Iterator[httpx.Client]:
    """Return a client with its own connections."""
    headers = {"Authorization": f"Bearer {large.admin_key}"}
    with httpx.Client(base_url=large.url, headers=headers, timeout=60) as client:
        yield client


def events_of(server: Server, request_id: str) -> list[dict[str, Any]]:
    lines = [line for line in server.log.read_text().splitlines() if request_id in line and line.endswith("}")]
    return [json.loads(line) for line in lines]


def is_over(server: Server, request_id: str) -> bool:
    return any(event["event"] == "request" for event in events_of(server, request_id))


def levels_of(server: Server, mark: int) -> set[str]:
    """Return the levels of the events logged after this position in the log."""
    return {json.loads(line)["level"] for line in server.log.read_bytes()[mark:].splitlines()}


def open_unread(server: Server, path: str, request_id: str, method: str = "GET", body: bytes = b"") -> socket.socket:
    """Open a request on a connection whose response is not read automatically."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.admin_key}\r\n"
        f"X-Request-ID: {request_id}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
    return connection


def readers(server: Server) -> list[psutil.Process]:
    """Return the processes that answer reads: the API's, and the query process."""
    api = psutil.Process(server.process.pid)
    return [api, *(child for child in api.children() if "tarn.query.engine.duckdb_server" in child.cmdline())]


def cpu(server: Server) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in readers(server))


def test_memory_is_bounded_while_a_client_reads_a_large_stream_slowly(large: Server, client: httpx.Client):
    size = len(client.get(STREAM).content)
    processes = readers(large)

    def memory() -> int:
        return sum(process.memory_info().rss for process in processes)

    before = memory()
    most, last = 0, b""

    with client.stream("GET", f"{STREAM}?end=true") as answer:
        for chunk in answer.iter_raw(TAKE):
            most = max(most, memory())
            last = (last + chunk)[-1000:]

    end = json.loads(last.splitlines()[-1])["$end"]
    assert end == {"snapshot": answer.headers["Tarn-Snapshot"], "count": MANY, "invalid": 0}
    assert size > 4 * MEMORY
    # What allocators keep is added to the query's memory limit, however long the stream is.
    assert most - before < size * 2 / 3


@pytest.mark.parametrize(
    "path", [STREAM, f"{STATEMENTS}/stream?prop=name&prop=country"], ids=["entities", "statements"]
)
def test_stream_is_cancelled_within_a_second_of_its_reader_disconnecting(large: Server, request, path: str):
    request_id, mark = f"disconnect-{request.node.callspec.id}", large.log.stat().st_size
    with open_unread(large, path, request_id) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")

    assert wait_until(lambda: is_over(large, request_id)) < 1
    assert levels_of(large, mark) == {"info"}


def test_query_is_cancelled_within_a_second_of_its_caller_disconnecting(large: Server):
    nodes = [{"field": "prop:name", "op": "ilike", "value": f"%{number}%x%y%z%"} for number in range(200)]
    body = json.dumps({"where": {"or": nodes}}).encode()
    mark, used = large.log.stat().st_size, cpu(large)
    with open_unread(large, f"{ENTITIES}/query", "cancelled", "POST", body):
        wait_until(lambda: cpu(large) > used + 0.5)

    assert wait_until(lambda: is_over(large, "cancelled")) < 1
    assert [event["status"] for event in events_of(large, "cancelled")] == [499]
    assert levels_of(large, mark) == {"info"}
    idle = cpu(large)
    assert httpx.get(f"{large.url}/healthz").elapsed.total_seconds() < 1
    assert cpu(large) - idle < 0.5


def test_stream_whose_client_does_not_read_is_closed_and_not_logged_as_an_error(large: Server):
    mark, received = large.log.stat().st_size, b""
    with open_unread(large, STREAM, "stalled") as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
        waited = wait_until(lambda: is_over(large, "stalled"))
        while chunk := connection.recv(1 << 20):
            received += chunk

    assert waited > STREAM_TIMEOUT * 0.9
    assert b"\r\n0\r\n\r\n" not in received
    assert [event["event"] for event in events_of(large, "stalled")][-2:] == [
        "stream aborted: the client stopped reading",
        "request",
    ]
    assert levels_of(large, mark) == {"info"}


def test_stream_over_the_limit_of_open_streams_is_refused_with_retry_after(large: Server, client: httpx.Client):
    with open_unread(large, STREAM, "open") as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
        refused = client.get(STREAM)
        listed = client.get(f"{ENTITIES}?limit=1")

    assert (refused.status_code, refused.json()["type"]) == (503, "/problems/unavailable")
    assert int(refused.headers["Retry-After"]) > 0
    assert listed.status_code == 200
    wait_until(lambda: client.get(f"{STREAM}?id=p-000001").status_code == 200)


@pytest.mark.parametrize("end", ["false", "true"])
def test_stream_that_fails_midway_is_aborted(large: Server, client: httpx.Client, end: str):
    received = b""
    with (
        client.stream("GET", STREAM, params={"end": end}) as answer,
        pytest.raises(httpx.RemoteProtocolError, match="incomplete"),
    ):
        chunks = answer.iter_raw()
        received += next(chunks)
        # Long values are spilled to a file while their rows are sorted, and are read back as the stream proceeds.
        (values,) = (large.folder / "tmp").rglob("spilled-*/values")
        values.write_bytes(b"")
        for chunk in chunks:
            received += chunk

    assert answer.status_code == 200
    lines = [json.loads(line) for line in received.splitlines()]
    assert 0 < len(lines) < MANY
    assert [line["$error"]["type"] for line in lines if "$error" in line] == ERRORS[end]
    assert "$error" in lines[-1] or end == "false"
    assert client.get(f"{ENTITIES}/p-000001").status_code == 200


ERRORS = {"false": [], "true": ["/problems/unavailable"]}


def test_more_ids_than_fit_into_a_url_are_refused(large: Server, client: httpx.Client):
    query = "&".join(["id=a"] * 100_000)
    with open_unread(large, f"{ENTITIES}?{query}", "ids") as connection:
        answer = connection.recv(65536)

    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"/problems/invalid-format" in answer
    assert client.get(f"{ENTITIES}?limit=1").status_code == 200
