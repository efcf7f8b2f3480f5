"""Ingest when the server is killed or clients disconnect: no acknowledged write is lost, none is stored in part."""

import http.client
import itertools
import signal
import socket
import threading
from collections import Counter
from contextlib import closing
from pathlib import Path

import orjson
import pytest
from sqlalchemy import select, update
from tarn.db.engine import Database
from tarn.db.tables import journal, journal_batches
from tarn.journal.expiry import sweep
from tarn.settings import Settings

from tests.server import Server, running
from tests.waiting import wait_until

REQUESTS, CLIENTS = 1000, 50


@pytest.fixture
def environment(settings: Settings) -> dict[str, str]:
    return {"TARN_DATABASE_URL": settings.database_url}


def entity(name: str, size: int = 3) -> dict[str, object]:
    return {"id": name, "schema": "Person", "properties": {"name": [f"{name} {number}" for number in range(size)]}}


def stored(database: Database) -> Counter[str]:
    """Return the number of visible statements of each entity."""
    with database.read() as connection:
        return Counter(
            connection.execute(
                select(journal.c.entity_id)
                .join(journal_batches, journal_batches.c.id == journal.c.batch)
                .where(journal_batches.c.state == "committed")
            ).scalars()
        )


@pytest.mark.parametrize("after", [50, 300])
def test_server_killed_during_a_thousand_requests_keeps_acknowledged_writes_and_no_partial_ones(
    tmp_path: Path, environment, database: Database, settings: Settings, after: int
):
    acknowledged: list[str] = []
    numbers = itertools.count()
    enough = threading.Event()

    def write(server: Server) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/x-ndjson"}
        with closing(http.client.HTTPConnection(host, int(port), timeout=60)) as connection:
            while (number := next(numbers)) < REQUESTS:
                # Every twentieth body is large enough for the bulk path.
                names = [f"r{number}-{part}" for part in range(2500 if number % 20 == 0 else 2)]
                body = b"".join(orjson.dumps(entity(name, 8 if len(names) > 2 else 3)) + b"\n" for name in names)
                try:
                    connection.request("POST", "/v1/datasets/test/entities", body, headers)
                    response = connection.getresponse()
                    response.read()
                except (OSError, http.client.HTTPException):
                    return
                if response.status == 200:
                    acknowledged.append(f"r{number}")
                if len(acknowledged) >= after:
                    enough.set()

    with running(tmp_path, **environment) as server:
        key = server.admin_key
        server.client().post("/v1/datasets", json={"name": "test"}).raise_for_status()
        threads = [threading.Thread(target=write, args=(server,)) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        assert enough.wait(120)
        server.stop(signal.SIGKILL)
        for thread in threads:
            thread.join()
    with database.write() as connection:
        connection.execute(update(journal_batches).where(journal_batches.c.state == "open").values(expires=_past()))
    sweep(database, settings)

    counts = stored(database)
    requests = {name.split("-")[0] for name in counts}
    assert len(acknowledged) >= after
    assert requests >= set(acknowledged)
    for request in requests:
        large = int(request[1:]) % 20 == 0
        names = [f"{request}-{part}" for part in range(2500 if large else 2)]
        assert {counts[name] for name in names} == {9 if large else 4}, f"{request} is stored in part"
    with database.read() as connection:
        assert {state for (state,) in connection.execute(select(journal_batches.c.state))} == {"committed"}
        assert sum(counts.values()) == len(connection.execute(select(journal.c.batch)).all())


def test_client_that_disconnects_while_sending_leaves_nothing(tmp_path: Path, environment, database: Database):
    line = orjson.dumps(entity("x", 5)) + b"\n"
    with running(tmp_path, **environment) as server:
        server.client().post("/v1/datasets", json={"name": "test"}).raise_for_status()
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(
                f"POST /v1/datasets/test/entities HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.admin_key}\r\n"
                f"Content-Type: application/x-ndjson\r\nContent-Length: {len(line) * 100_000}\r\n\r\n".encode()
            )
            connection.sendall(line * 20_000)
            wait_until(lambda: _batches(database) == ["open"])
        wait_until(lambda: _batches(database) == [])
        with database.read() as connection:
            rows = connection.execute(select(journal.c.batch)).all()

    assert rows == []


def _batches(database: Database) -> list[str]:
    with database.read() as connection:
        return list(connection.execute(select(journal_batches.c.state)).scalars())


def _past():
    from datetime import timedelta

    from tarn.model.ids import now

    return now() - timedelta(hours=1)
