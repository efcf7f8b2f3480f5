"""Event streams of a real server: no event is missed, and a client that does not read affects no other client."""

import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import psutil
import pytest
from tarn.db import migrate
from tarn.db import outbox as events
from tarn.db.engine import Database
from tarn.model.work.event import EventKind

from tests.server import Server, running
from tests.waiting import wait_until

STREAM_TIMEOUT = 1.0
SETTINGS = {
    "TARN_EVENT_POLL": "0.05",
    "TARN_EVENT_HEARTBEAT": "0.2",
    "TARN_STREAM_TIMEOUT": str(STREAM_TIMEOUT),
    "TARN_EVENT_STREAMS_PER_TENANT": "4",
    "TARN_EVENT_STREAMS": "6",
}


@contextmanager
def api(folder: Path, **more: str) -> Iterator[Server]:
    """Start a server without a worker, so that queued jobs stay queued."""
    database = Database(f"sqlite:///{folder}/data/tarn.db")
    migrate.upgrade(database)
    database.close()
    with running(folder, "api", **SETTINGS, **more) as server:
        yield server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with api(tmp_path_factory.mktemp("events")) as server:
        yield server


@pytest.fixture(scope="module")
def database(server: Server) -> Iterator[Database]:
    """Open the server's own database."""
    database = Database(f"sqlite:///{server.folder}/data/tarn.db")
    yield database
    database.close()


@pytest.fixture
def admin(server: Server) -> httpx.Client:
    return server.client()


@pytest.fixture
def dataset(admin: httpx.Client) -> dict[str, Any]:
    response = admin.post("/v1/datasets", json={"name": f"n{uuid4().hex[:12]}"})
    assert response.status_code == 201
    created: dict[str, Any] = response.json()
    return created


def tenant(server: Server, **grants: str) -> tuple[str, httpx.Client]:
    """Create a tenant with a grant for each `dataset=level`; return its name and a client of it."""
    name, admin = f"t{uuid4().hex[:12]}", server.client()
    admin.post("/v1/admin/tenants", json={"name": name})
    for dataset, level in grants.items():
        response = admin.post(f"/v1/admin/tenants/{name}/grants", json={"dataset": dataset, "level": level})
        assert response.status_code == 201
    return name, server.client(admin.post(f"/v1/admin/tenants/{name}/keys", json={}).json()["key"])


def path(dataset: dict[str, Any]) -> str:
    return f"/v1/datasets/{dataset['name']}/events"


def stream_of(dataset: dict[str, Any], database: Database) -> str:
    with database.read() as connection:
        row = connection.exec_driver_sql("SELECT id FROM datasets WHERE name = ?", (dataset["name"],))
        return str(row.scalar_one())


def publish(database: Database, stream: str, *numbers: int, audience: list[str] | None = None) -> None:
    """Publish events of these snapshots in one transaction."""
    with database.write() as connection:
        for seq in numbers:
            data: dict[str, Any] = {"snapshot": f"s{seq}", "seq": seq, "content": seq, "operation": "flush"}
            events.record(connection, stream, EventKind.SNAPSHOT_PUBLISHED, audience=audience, **data)


class EventStream:
    """An open event stream, read block by block."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._blocks = self._read()

    def _read(self) -> Iterator[dict[str, str]]:
        lines: dict[str, str] = {}
        for line in self.response.iter_lines():
            if line:
                name, _, value = line.partition(":")
                lines[name] = value.removeprefix(" ")
            elif lines:
                yield lines
                lines = {}

    def block(self) -> dict[str, str]:
        """Return the next block that is sent, whatever it is; a comment has no name."""
        return next(self._blocks)

    def event(self) -> dict[str, Any]:
        """Return the next event."""
        block = next(block for block in self._blocks if "data" in block)
        event: dict[str, Any] = json.loads(block["data"])
        assert (str(event["id"]), event["kind"]) == (block["id"], block["event"])
        return event

    def events(self, number: int) -> list[dict[str, Any]]:
        return [self.event() for _ in range(number)]

    def rest(self) -> list[dict[str, Any]]:
        """Return all events until the server ends the stream."""
        return [json.loads(block["data"]) for block in self._blocks if "data" in block]


@contextmanager
def following(client: httpx.Client, path: str, last: int | None = None, **params: Any) -> Iterator[EventStream]:
    headers = {} if last is None else {"Last-Event-ID": str(last)}
    with client.stream("GET", path, params=params, headers=headers) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["Content-Type"].startswith("text/event-stream")
        stream = EventStream(response)
        assert stream.block() == {"retry": "2000"}
        yield stream


def open_streams(client: httpx.Client) -> float:
    return metric(client, "tarn_event_streams")


def metric(client: httpx.Client, name: str) -> float:
    match = re.search(rf"^{re.escape(name)} (\S+)$", client.get("/metrics").text, re.MULTILINE)
    return float(match[1]) if match else 0


def test_follower_receives_events_after_its_start_in_order(admin, dataset, database):
    stream = stream_of(dataset, database)
    publish(database, stream, 1)
    with following(admin, path(dataset)) as followed:
        for seq in range(2, 5):
            publish(database, stream, seq)
        received = followed.events(3)

    assert [(event["seq"], event["dataset"], event["stream"]) for event in received] == [
        (seq, dataset["name"], stream) for seq in range(2, 5)
    ]
    assert [event["id"] for event in received] == [3, 4, 5]


@pytest.mark.parametrize("how", ["header", "query", "both"])
def test_follower_that_reconnects_receives_all_events_since(admin, dataset, database, how: str):
    stream = stream_of(dataset, database)
    publish(database, stream, *range(1, 250))
    options = {
        "header": {"last": 1},
        "query": {"since": 1},
        "both": {"last": 1, "since": 100},
    }[how]

    with following(admin, path(dataset), **options) as followed:
        old = followed.events(249)
        publish(database, stream, 250)
        new = followed.event()

    assert [event["seq"] for event in [*old, new]] == list(range(1, 251))


def test_follower_from_before_the_oldest_event_receives_an_event_of_kind_missed(admin, dataset, database):
    stream = stream_of(dataset, database)
    publish(database, stream, *range(1, 5))
    with database.write() as connection:
        events.trim(connection, stream, 3)

    with following(admin, path(dataset), last=1) as followed:
        behind = followed.events(3)
    with following(admin, path(dataset), last=900) as followed:
        ahead = followed.events(3)
    with following(admin, path(dataset), last=3) as followed:
        in_time = followed.events(2)

    assert [(event["id"], event["kind"]) for event in behind] == [
        (3, "missed"),
        (4, "snapshot.published"),
        (5, "snapshot.published"),
    ]
    assert (behind[0]["after"], behind[0]["first"]) == (1, 4)
    assert [(event["id"], event.get("after")) for event in ahead] == [(3, 900), (4, None), (5, None)]
    assert [event["id"] for event in in_time] == [4, 5]


def test_heartbeats_are_sent_while_idle_and_carry_the_id_of_skipped_events(admin, dataset, database, server):
    _, reader = tenant(server, **{dataset["name"]: "read"})
    stream = stream_of(dataset, database)
    with following(reader, path(dataset), since=0) as followed:
        first = followed.event()
        publish(database, stream, 1, audience=["another"])
        blocks = [followed.block()]
        while "id" not in blocks[-1]:
            blocks.append(followed.block())

    assert first["kind"] == "dataset.created"
    assert all(set(block) == {""} for block in blocks[:-1])
    assert blocks[-1] == {"": "", "id": "2"}


def test_events_are_filtered_by_kind_and_audience(admin, dataset, database, server):
    name, reader = tenant(server, **{dataset["name"]: "read"})
    stream = stream_of(dataset, database)
    publish(database, stream, 1, audience=[name])
    publish(database, stream, 2, audience=["another"])
    admin.post(f"/v1/datasets/{dataset['name']}/operations/flush")
    publish(database, stream, 3)

    with following(reader, path(dataset), since=0) as followed:
        own = followed.events(3)
    with following(admin, path(dataset), since=0) as followed:
        everything = followed.events(5)
    with following(reader, path(dataset), since=0, kind=["export.made", "snapshot.published"]) as followed:
        chosen = followed.events(2)

    assert [event.get("seq", event["kind"]) for event in own] == ["dataset.created", 1, 3]
    assert [event.get("seq", event["kind"]) for event in everything] == ["dataset.created", 1, 2, "job.queued", 3]
    assert [event["seq"] for event in chosen] == [1, 3]


def test_only_readers_of_a_dataset_and_owners_of_a_job_may_follow_it(admin, dataset, server):
    _, stranger = tenant(server)
    job = admin.post(f"/v1/datasets/{dataset['name']}/operations/flush").json()["id"]

    answers = [
        stranger.get(path(dataset)),
        stranger.get(f"/v1/jobs/{job}/events"),
        httpx.get(f"{server.url}{path(dataset)}"),
        admin.get(path(dataset), headers={"Accept": "application/json"}),
        admin.get(path(dataset), headers={"Last-Event-ID": "abc"}),
    ]

    assert [(answer.status_code, answer.json()["type"]) for answer in answers] == [
        (404, "/problems/dataset-not-found"),
        (404, "/problems/job-not-found"),
        (401, "/problems/unauthenticated"),
        (406, "/problems/not-acceptable"),
        (422, "/problems/schema-violation"),
    ]


def test_stream_of_a_job_ends_with_the_job_and_returns_204_to_a_reconnecting_client(admin, dataset):
    job = admin.post(f"/v1/datasets/{dataset['name']}/operations/flush").json()["id"]
    at = f"/v1/jobs/{job}/events"
    with following(admin, at) as followed:
        queued = followed.event()
        admin.delete(f"/v1/jobs/{job}")
        rest = followed.rest()
    with following(admin, at) as followed:
        again = followed.rest()
    ended = admin.get(at, headers={"Last-Event-ID": str(rest[-1]["id"])})

    assert (queued["kind"], queued["job"]) == ("job.queued", job)
    assert [event["kind"] for event in rest] == ["job.cancelled"]
    assert again == [queued, *rest]
    assert (ended.status_code, ended.content) == (204, b"")


def test_stream_of_a_dataset_ends_with_the_dataset(admin, dataset):
    with following(admin, path(dataset)) as followed:
        assert admin.delete(f"/v1/datasets/{dataset['name']}?confirm={dataset['name']}").status_code == 202
        kinds = [event["kind"] for event in followed.rest()]

    assert kinds == ["dataset.deleted", "job.queued"]


@pytest.mark.parametrize("taken", ["key", "grant", "tenant"])
def test_stream_ends_when_its_key_grant_or_tenant_is_removed(admin, dataset, database, server, taken: str):
    name, reader = tenant(server, **{dataset["name"]: "read"})
    base = f"/v1/admin/tenants/{name}"
    (key,) = admin.get(f"{base}/keys").json()["results"]
    (grant,) = admin.get(f"{base}/grants").json()["results"]
    with following(reader, path(dataset)) as followed:
        answer = {
            "key": lambda: admin.delete(f"/v1/admin/keys/{key['id']}"),
            "grant": lambda: admin.delete(f"/v1/admin/grants/{grant['id']}"),
            "tenant": lambda: admin.patch(base, json={"disabled": True}),
        }[taken]()
        publish(database, stream_of(dataset, database), 1)
        rest = followed.rest()

    assert answer.is_success
    assert rest == []


def test_tenant_with_too_many_streams_is_refused_and_others_are_not(admin, dataset, server):
    _, greedy = tenant(server, **{dataset["name"]: "read"})
    _, other = tenant(server, **{dataset["name"]: "read"})
    wait_until(lambda: open_streams(admin) == 0)
    with (
        following(greedy, path(dataset)),
        following(greedy, path(dataset)),
        following(greedy, path(dataset)),
        following(greedy, path(dataset)),
    ):
        refused = greedy.get(path(dataset))
        with following(other, path(dataset)), following(other, path(dataset)):
            full = other.get(path(dataset))
            assert open_streams(admin) == 6

    assert (refused.status_code, refused.json()["type"]) == (429, "/problems/rate-limited")
    assert (full.status_code, full.json()["type"]) == (503, "/problems/unavailable")
    assert all(int(answer.headers["Retry-After"]) > 0 for answer in (refused, full))
    wait_until(lambda: open_streams(admin) == 0)


def test_client_that_never_reads_is_disconnected_and_others_are_not_affected(admin, dataset, database, server):
    stream = stream_of(dataset, database)
    files = [{"id": "a" * 40, "checksum": "b" * 64, "path": "p" * 4000} for _ in range(20)]
    with database.write() as connection:
        for _ in range(400):
            events.record(connection, stream, EventKind.FILES_PUT, count=20, files=files)
    stalled = 'tarn_event_streams_ended_total{reason="stalled"}'
    before, threads = metric(admin, stalled), psutil.Process(server.process.pid).num_threads()
    with socket.socket() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        head = f"GET {path(dataset)}?since=0 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.admin_key}\r\n\r\n"
        stuck.sendall(head.encode())
        wait_until(lambda: open_streams(admin) == 1)
        with following(admin, path(dataset)) as followed:
            publish(database, stream, 1)
            received = followed.event()
        wait_until(lambda: metric(admin, stalled) == before + 1)

    assert received["seq"] == 1
    assert psutil.Process(server.process.pid).num_threads() <= threads + 2
    wait_until(lambda: open_streams(admin) == 0)


def test_streams_end_when_the_server_stops(tmp_path: Path):
    with api(tmp_path) as server:
        admin = server.client()
        admin.post("/v1/datasets", json={"name": "short"})
        with following(admin, "/v1/datasets/short/events", since=0) as followed:
            assert followed.event()["kind"] == "dataset.created"
            code = server.stop()
            rest = followed.rest()

    assert (code, rest) == (0, [])


@pytest.mark.long
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_streams_on_postgresql_send_events_of_a_dataset_its_files_and_its_jobs(tmp_path: Path, database_url: str):
    with api(tmp_path, TARN_DATABASE_URL=database_url) as server:
        admin = server.client()
        admin.post("/v1/datasets", json={"name": "events"})
        with following(admin, "/v1/datasets/events/events", since=0) as followed:
            file = admin.put("/v1/datasets/events/files?path=a/b.txt", content=b"hello").json()
            admin.delete(f"/v1/datasets/events/files/{file['checksum']}/{file['id']}")
            admin.delete("/v1/datasets/events?confirm=events")
            received = followed.rest()

    assert [event["kind"] for event in received] == [
        "dataset.created",
        "files.put",
        "file.deleted",
        "dataset.deleted",
        "job.queued",
    ]
    assert (received[1]["count"], received[1]["files"][0]["path"]) == (1, "a/b.txt")
    assert [event["id"] for event in received] == [1, 2, 3, 4, 5]
