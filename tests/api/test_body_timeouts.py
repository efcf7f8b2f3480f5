"""Request bodies that stop or trickle: refused in time, nothing stored, and their slots released."""

import asyncio
import gzip
import select
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import httpx
import pytest
from starlette.types import Message
from tarn.access.bootstrap import ensure_admin
from tarn.api.http.bodies.body_feed import MAX_CONCURRENT
from tarn.api.http.bodies.body_middleware import BodyMiddleware, Pace
from tarn.api.http.ingest import HEAD, UPLOADS
from tarn.api.http.limits.tenant_semaphore import FairSemaphore
from tarn.api.http.middleware import protocol
from tarn.db.engine import Database
from tarn.errors import BodyTimeout
from tarn.main import build_services
from tarn.settings import Settings
from tarn.storage.store import Store

from tests.in_process_api import ONE_DATABASE
from tests.listening import Listening, answer_on, head, listening
from tests.waiting import wait_until

IDLE, RATE, GRACE = 30.0, 1000, 60.0
BRIEF = 0.3
"""Time-outs in seconds, for tests that really wait for them."""

DATASET = "/v1/datasets/slow"
NDJSON = {"Content_Type": "application/x-ndjson"}
JSON = {"Content_Type": "application/json"}
LINE = b'{"id": "p-%d", "schema": "Person", "properties": {"name": ["Jane Doe"], "notes": ["%s"]}}\n'


# The rate of a body, in virtual time


class VirtualTime(asyncio.SelectorEventLoop):
    """An event loop that never sleeps: when no callback is ready, it advances to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        real_select = self._selector.select  # type: ignore[attr-defined]

        def select_without_waiting(timeout: float | None = None) -> Any:
            self._now += timeout or 0.0
            return real_select(0)

        self._selector.select = select_without_waiting  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._now


class Client:
    """Sends pieces of a body, each after the given number of seconds in which the server reads, and then nothing."""

    def __init__(self, pieces: list[tuple[float, bytes]], ends: bool = True) -> None:
        self._pieces = pieces
        self._ends = ends
        self._sent = 0

    async def receive(self) -> Message:
        if self._sent == len(self._pieces):
            await asyncio.Event().wait()
        seconds, body = self._pieces[self._sent]
        await asyncio.sleep(seconds)
        self._sent += 1
        more = not self._ends or self._sent < len(self._pieces)
        return {"type": "http.request", "body": body, "more_body": more}


Reading = Callable[[Callable[[], Awaitable[Message]]], Awaitable[int]]


async def read_all(receive: Callable[[], Awaitable[Message]]) -> int:
    size = 0
    while True:
        message = await receive()
        size += len(message["body"])
        if not message["more_body"]:
            return size


def read(client: Client, reading: Reading = read_all, pace: Pace = Pace(IDLE, RATE, GRACE)) -> tuple[int, float]:  # noqa: B008 - a value
    """Return how many bytes were read, and in how many seconds."""
    results: list[int] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        results.append(await reading(receive))

    async def send(message: Message) -> None:
        raise AssertionError(f"unexpected message: {message}")

    loop = VirtualTime()
    try:
        bodies = BodyMiddleware(application, 1 << 30, pace)
        loop.run_until_complete(bodies({"type": "http", "headers": []}, client.receive, send))
        return results[0], loop.time()
    finally:
        loop.close()


def test_body_that_stops_is_refused_after_the_idle_timeout():
    with pytest.raises(BodyTimeout, match=r"after 5000 bytes of the body no more came for 30 seconds"):
        read(Client([(1, b"x" * 5000)], ends=False))


def test_body_that_never_begins_is_refused_after_the_idle_timeout():
    with pytest.raises(BodyTimeout, match="after 0 bytes"):
        read(Client([]))


def test_slow_body_above_the_minimum_rate_has_no_total_time_limit():
    hours = 5
    pieces = [(20.0, b"x" * 20 * (RATE + 1))] * (hours * 180)

    assert read(Client(pieces)) == (len(pieces) * 20 * (RATE + 1), hours * 3600)


def test_one_byte_before_each_idle_timeout_is_below_the_minimum_rate():
    with pytest.raises(BodyTimeout, match=r"60 seconds behind the minimum rate of 1000 bytes a second"):
        read(Client([(IDLE - 1, b"x")] * 1000))


def test_body_that_was_fast_at_first_is_refused_when_it_trickles_later():
    with pytest.raises(BodyTimeout, match="minimum rate"):
        read(Client([(0, b"x" * (64 << 20)), *[(IDLE - 1, b"x")] * 1000]))


def test_body_that_stalls_and_then_catches_up_is_read():
    stall = [(25.0, b"x"), (25.0, b"x" * 60_000)]

    assert read(Client(stall * 100)) == (60_001 * 100, 5000)


def test_messages_without_bytes_do_not_reset_the_idle_timeout():
    with pytest.raises(BodyTimeout, match="no more came"):
        read(Client([(20, b""), (20, b"x")]))


def test_without_a_minimum_rate_only_idle_time_counts():
    assert read(Client([(IDLE - 1, b"x")] * 1000), pace=Pace(IDLE, 0, GRACE))[0] == 1000


def test_time_in_which_the_server_does_not_read_does_not_count():
    async def busy(receive: Callable[[], Awaitable[Message]]) -> int:
        size = 0
        while True:
            await asyncio.sleep(3600)
            message = await receive()
            size += len(message["body"])
            if not message["more_body"]:
                return size

    assert read(Client([(1, b"x")] * 20), busy)[0] == 20


def test_wait_that_is_cancelled_and_repeated_counts_in_full():
    async def read_repeatedly(receive: Callable[[], Awaitable[Message]]) -> int:
        for _ in range(4):
            with suppress(TimeoutError):
                async with asyncio.timeout(10):
                    await receive()
        return 0

    with pytest.raises(BodyTimeout, match="no more came"):
        read(Client([]), read_repeatedly)


def test_bytes_that_arrived_while_the_event_loop_was_busy_are_read_after_the_timeout():
    client, arrived = Client([(0, b"x" * 10)]), asyncio.Event()

    async def receive_late() -> Message:
        await arrived.wait()
        return await client.receive()

    class Late(Client):
        async def receive(self) -> Message:
            # The time-out's timer is due in the same iteration of the loop in which the bytes are received.
            asyncio.get_running_loop().call_later(IDLE, arrived.set)
            return await receive_late()

    assert read(Late([]))[0] == 10


def test_complete_body_is_not_timed_out():
    async def read_and_wait(receive: Callable[[], Awaitable[Message]]) -> int:
        size = await read_all(receive)
        with suppress(TimeoutError):
            async with asyncio.timeout(3600):
                await receive()
        return size

    assert read(Client([(0, b"x")]), read_and_wait) == (1, 3600)


# On real connections


@pytest.fixture
def key(settings: Settings, database: Database) -> str:
    key = ensure_admin(database, settings)
    assert key is not None
    return key


@pytest.fixture
def short_timeout_server(settings: Settings, database: Database, store: Store, key: str) -> Iterator[Listening]:
    """Return a server with short time-outs, and a dataset."""
    short = {"body_idle_timeout": BRIEF, "body_min_rate": 1 << 20, "body_rate_grace": 3 * BRIEF}
    with listening(build_services(settings.model_copy(update=short), database, store)) as server:
        with server.client(key) as client:
            assert client.post("/v1/datasets", json={"name": "slow"}).status_code == 201
        yield server


def stop_halfway(server: Listening, request: bytes, body: bytes) -> tuple[int, dict[str, str], dict[str, object]]:
    """Send a request with only this part of its body; return the response before the connection is closed."""
    with server.connect() as connection:
        connection.sendall(request + body)
        return answer_on(connection)


def assert_timed_out(response: tuple[int, dict[str, str], dict[str, object]]) -> dict[str, object]:
    status, headers, problem = response
    assert (status, problem["type"], problem["retryable"]) == (408, "/problems/body-timeout", True), problem
    assert headers["connection"] == "close"
    return problem


def lines(size: int) -> bytes:
    """Return entities of at least so many bytes: few large ones, which are parsed quickly."""
    notes = b"x" * min(size, 50_000)
    return b"".join(LINE % (number, notes) for number in range(1 + size // len(notes)))


FORM = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\nsome of the file'


@pytest.mark.parametrize(
    ("method", "path", "headers", "body"),
    [
        ("POST", "/v1/datasets", JSON, b'{"name": "hal'),
        ("POST", f"{DATASET}/entities", NDJSON, lines(1000)),
        ("POST", f"{DATASET}/entities", NDJSON, lines(HEAD + (HEAD >> 1))),
        ("POST", f"{DATASET}/statements", {"Content_Type": "text/csv"}, b"canonical_id,entity_id"),
        ("PUT", f"{DATASET}/files?path=a.txt", {}, b"some of the file"),
        ("PUT", f"{DATASET}/files?path=a.txt", {}, b"some of the file " * (3 << 16)),
        ("POST", f"{DATASET}/files", {"Content_Type": "multipart/form-data; boundary=b"}, FORM),
        ("PUT", f"{DATASET}/mappings/{'a' * 64}", {"Content_Type": "application/yaml"}, b"mapping:"),
        ("POST", f"{DATASET}/entities/query", JSON, b'{"where": '),
    ],
    ids=["document", "records", "many-records", "statements", "file", "large-file", "form", "mapping", "query"],
)
@ONE_DATABASE
def test_body_that_stops_halfway_is_refused_and_changes_nothing(
    short_timeout_server: Listening, key: str, method: str, path: str, headers: dict[str, str], body: bytes
):
    with short_timeout_server.client(key) as client:
        before = state(client)
        request = head(method, path, key, Content_Length=str(len(body) + 100), **headers)

        problem = assert_timed_out(stop_halfway(short_timeout_server, request, body))

        assert f"after {len(body)} bytes" in str(problem["detail"])
        assert state(client) == before


def state(client: httpx.Client) -> list[object]:
    """Return the server's content: datasets, files, mappings, and statements in the journal."""
    paths = ["/v1/datasets", f"{DATASET}/files", f"{DATASET}/mappings", f"{DATASET}/journal"]
    responses = [client.get(path) for path in paths]
    assert [response.status_code for response in responses] == [200] * len(paths)
    return [response.json() for response in responses]


@ONE_DATABASE
def test_upload_block_that_stops_halfway_is_refused_and_can_be_sent_again(short_timeout_server: Listening, key: str):
    block = b"0123456789" * 10
    with short_timeout_server.client(key) as client:
        new = client.post(f"{DATASET}/uploads", json={"length": len(block), "path": "a"})
        path = f"{DATASET}/uploads/{new.json()['id']}"
        request = head("PUT", f"{path}?offset=0", key, Content_Length=str(len(block)))

        assert_timed_out(stop_halfway(short_timeout_server, request, block[:50]))

        assert client.get(path).json() == new.json()
        assert client.put(f"{path}?offset=0", content=block).is_success
        assert client.post(f"{path}/commit").status_code == 201


@ONE_DATABASE
def test_compressed_body_that_stops_halfway_is_refused(short_timeout_server: Listening, key: str):
    body = gzip.compress(lines(100_000))
    request = head("POST", f"{DATASET}/entities", key, Content_Length=str(len(body)), Content_Encoding="gzip", **NDJSON)

    problem = assert_timed_out(stop_halfway(short_timeout_server, request, body[: len(body) // 2]))

    assert f"after {len(body) // 2} bytes" in str(problem["detail"]), "bytes count as they are sent"


@ONE_DATABASE
def test_client_that_sends_nothing_after_100_continue_is_refused(short_timeout_server: Listening, key: str):
    request = head("POST", f"{DATASET}/entities", key, Content_Length="100", Expect="100-continue", **NDJSON)

    assert_timed_out(stop_halfway(short_timeout_server, request, b""))


@pytest.mark.parametrize("end", [b"0\r\n", b"0\r\nX-Trailer: a", b"5;name=value"])
@ONE_DATABASE
def test_chunked_body_without_its_last_chunk_is_refused(short_timeout_server: Listening, key: str, end: bytes):
    request = head("POST", f"{DATASET}/entities", key, Transfer_Encoding="chunked", **NDJSON)
    line = LINE % (1, b"")

    assert_timed_out(stop_halfway(short_timeout_server, request, b"%x\r\n%s\r\n" % (len(line), line) + end))


@pytest.mark.parametrize("before", [b"", lines(2 * HEAD)], ids=["small", "large"])
@ONE_DATABASE
def test_body_that_trickles_is_refused_although_it_is_never_idle(
    short_timeout_server: Listening, key: str, before: bytes
):
    request = head("POST", f"{DATASET}/entities", key, Content_Length=str(1 << 30), **NDJSON)
    with short_timeout_server.connect() as connection:
        connection.sendall(request + before)
        # Send a byte every third of the idle time-out until the server answers or closes.
        while not select.select([connection], [], [], BRIEF / 3)[0]:
            connection.sendall(b"\n")

        problem = assert_timed_out(answer_on(connection))

    assert "minimum rate of 1048576 bytes a second" in str(problem["detail"])


@ONE_DATABASE
def test_connection_is_reused_after_bodies_that_arrived_in_time(long_timeout_server: Listening, key: str):
    with long_timeout_server.connect() as connection:
        for number in range(3):
            line = LINE % (number, b"")
            request = head("POST", f"{DATASET}/entities", key, Content_Length=str(len(line)), **NDJSON)
            connection.sendall(request + line[:10])
            connection.sendall(line[10:])
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


@ONE_DATABASE
def test_read_with_a_body_that_never_arrives_ends(short_timeout_server: Listening, key: str):
    with short_timeout_server.connect() as connection:
        connection.sendall(head("GET", f"{DATASET}/events", key, Content_Length="100"))

        # The event stream treats its client as disconnected.
        response = connection.recv(65536)
        while not response.endswith(b"\r\n0\r\n\r\n"):
            response += connection.recv(65536)
        assert b"text/event-stream" in response


@ONE_DATABASE
def test_remaining_body_of_an_answered_request_has_the_time_limit_of_a_head(
    short_timeout_server: Listening, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(protocol, "HEAD_SECONDS", BRIEF)
    with short_timeout_server.connect() as connection:
        connection.sendall(head("POST", f"{DATASET}/entities", None, Content_Length=str(1 << 40), **NDJSON))
        assert connection.recv(65536).startswith(b"HTTP/1.1 401 ")

        # The server closes the connection, however steadily the rest of the body arrives.
        with suppress(ConnectionError):
            while not select.select([connection], [], [], BRIEF / 10)[0]:
                connection.sendall(b"x")
            assert connection.recv(65536) == b""


# Sixty uploads that stop halfway


@pytest.fixture
def long_timeout_server(settings: Settings, database: Database, store: Store, key: str) -> Iterator[Listening]:
    """Return a server whose time-outs exceed every test's duration, with a dataset that two tenants may write to."""
    long = {"body_idle_timeout": 3600, "body_rate_grace": 3600}
    with listening(build_services(settings.model_copy(update=long), database, store)) as server:
        with server.client(key) as client:
            assert client.post("/v1/datasets", json={"name": "slow"}).status_code == 201
        yield server


def tenant(server: Listening, admin: str, name: str) -> str:
    """Create a tenant that may write to the dataset, and return its key."""
    with server.client(admin) as client:
        assert client.post("/v1/admin/tenants", json={"name": name}).status_code == 201
        grant = {"dataset": "slow", "level": "write"}
        assert client.post(f"/v1/admin/tenants/{name}/grants", json=grant).status_code == 201
        return str(client.post(f"/v1/admin/tenants/{name}/keys", json={}).json()["key"])


@pytest.fixture
def requested_slots(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the total number of slots of its kind for every slot that is requested."""
    acquire, requested = FairSemaphore.acquire, []

    async def counted(self: FairSemaphore) -> str:
        requested.append(self.limit)
        return await acquire(self)

    monkeypatch.setattr(FairSemaphore, "acquire", counted)
    return requested


def open_stalled_uploads(server: Listening, stack: ExitStack, key: str, method: str, path: str) -> list[socket.socket]:
    """Open sixty uploads that each sent two of four megabytes."""
    request = head(method, path, key, Content_Length=str(4 * HEAD), **NDJSON)
    connections = [stack.enter_context(server.connect()) for _ in range(60)]
    for connection in connections:
        connection.sendall(request + lines(2 * HEAD))
    return connections


@pytest.mark.parametrize(
    ("method", "path", "status", "slots"),
    [
        ("POST", f"{DATASET}/entities", 200, UPLOADS),
        ("PUT", f"{DATASET}/files?path=a", 201, MAX_CONCURRENT),
    ],
    ids=["entities", "files"],
)
def test_sixty_stalled_uploads_leave_a_slot_to_the_next_tenant(
    long_timeout_server: Listening,
    key: str,
    method: str,
    path: str,
    status: int,
    slots: int,
    requested_slots: list[int],
):
    hostile, other = tenant(long_timeout_server, key, "hostile"), tenant(long_timeout_server, key, "other")
    with ExitStack() as stack, long_timeout_server.client(other) as client:
        open_stalled_uploads(long_timeout_server, stack, hostile, method, path)
        wait_until(lambda: requested_slots.count(slots) == 60)

        response = client.request(
            method, path, content=lines(2 * HEAD), headers={"Content-Type": "application/x-ndjson"}
        )

    assert response.status_code == status, response.text


def test_sixty_stalled_uploads_are_refused_and_release_their_slots(short_timeout_server: Listening, key: str):
    hostile = tenant(short_timeout_server, key, "hostile")
    with ExitStack() as stack, short_timeout_server.client(hostile) as client:
        responses = [
            answer_on(each)
            for each in open_stalled_uploads(short_timeout_server, stack, hostile, "POST", f"{DATASET}/entities")
        ]
        for response in responses:
            assert_timed_out(response)

        assert len(responses) > UPLOADS
        headers = {"Content-Type": "application/x-ndjson"}
        # On a busy machine this one may miss its time, too.
        wait_until(lambda: client.post(f"{DATASET}/entities", content=lines(2 * HEAD), headers=headers).is_success)
