"""One tenant at full speed, within its limits, beside another: how far it moves the other's p99.

Alone and beside are measured in turns in one run, so that whatever else the machine does hits both alike. A p99 of some
hundred requests is the eighth worst of them, and a disk that stands still for a moment is all eight: so each turn has a
ratio of its own, and the one in the middle counts.
"""

import multiprocessing
import os
import selectors
import socket
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, count, cycle
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import orjson

from bench.clients import QUIET
from tests.server import Server, running

ROUNDS, SECONDS = 5, 3.0
MAX_P99_RATIO = 2.0
"""How many times its p99 alone a tenant's p99 may be beside another that is at full speed."""
PEOPLE, BODY = 20_000, 5_000


class Load(NamedTuple):
    """What the tenant at full speed sends, by how many clients at once, and its requests a second; 0 is no limit."""

    clients: int
    rate: float
    request: Callable[[], Iterator[tuple[str, str, bytes]]]


def _singles() -> Iterator[tuple[str, str, bytes]]:
    for number in count():
        yield "POST", "/v1/datasets/a/entities", _person(f"s{number}")


def _queries() -> Iterator[tuple[str, str, bytes]]:
    asked = orjson.dumps({"group_by": ["schema"], "metrics": ["count"]})
    yield from cycle([("POST", "/v1/datasets/a/entities/aggregate", asked)])


def _bodies() -> Iterator[tuple[str, str, bytes]]:
    people = b"[" + b",".join(_person(f"b{number}") for number in range(BODY)) + b"]"
    yield from cycle([("POST", "/v1/datasets/a/entities", people)])


LOADS = {
    "singles": Load(32, 50, _singles),
    "singles without a limit": Load(32, 0, _singles),
    "queries": Load(8, 5, _queries),
    "bodies": Load(4, 1, _bodies),
}


def run() -> dict[str, Any]:
    """p99 of a tenant that writes and reads single entities, alone and beside each load; what became of the load."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, running(Path(folder), **QUIET) as server:
        keys = {name: _tenant(server, name) for name in ("a", "b")}
        _load(server, keys["a"], PEOPLE)
        _measured(server, keys["b"], SECONDS)
        for name, load in LOADS.items():
            results |= {f"{name}: {measure}": value for measure, value in _compare(server, keys, load).items()}
    results["met"] = all(results[f"{name}: p99 beside / alone"] < MAX_P99_RATIO for name in LOADS)
    return results


def _compare(server: Server, keys: dict[str, str], load: Load) -> dict[str, Any]:
    limits = {"rate_limit": load.rate, "rate_burst": max(1, int(load.rate))}
    server.client().put("/v1/admin/tenants/a/limits", json=limits).raise_for_status()
    alone: list[list[float]] = []
    beside: list[list[float]] = []
    statuses: Counter[str] = Counter()
    for _ in range(ROUNDS):
        alone.append(_measured(server, keys["b"], SECONDS))
        with _pressing(server, keys["a"], load) as told:
            beside.append(_measured(server, keys["b"], SECONDS))
        statuses.update(told)
    ratios = [_p99(one) / _p99(other) for one, other in zip(beside, alone, strict=True)]
    return {
        "alone p50 ms": statistics.median(chain(*alone)) * 1000,
        "beside p50 ms": statistics.median(chain(*beside)) * 1000,
        "alone p99 ms": statistics.median(map(_p99, alone)) * 1000,
        "beside p99 ms": statistics.median(map(_p99, beside)) * 1000,
        "p99 beside / alone": statistics.median(ratios),
        "of all turns": f"{min(ratios):.2f} to {max(ratios):.2f}",
        "answers to the other": dict(sorted(statuses.items())),
        "answers to the other for each": statuses.total() / sum(map(len, beside)),
    }


def _p99(times: list[float]) -> float:
    return statistics.quantiles(times, n=100)[98]


def _tenant(server: Server, name: str) -> str:
    admin = server.client()
    admin.post("/v1/datasets", json={"name": name}).raise_for_status()
    admin.post("/v1/admin/tenants", json={"name": name}).raise_for_status()
    grant = {"dataset": name, "level": "write"}
    admin.post(f"/v1/admin/tenants/{name}/grants", json=grant).raise_for_status()
    key: str = admin.post(f"/v1/admin/tenants/{name}/keys", json={}).json()["key"]
    return key


def _load(server: Server, key: str, people: int) -> None:
    body = b"\n".join(_person(f"p{number}") for number in range(people))
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/x-ndjson"}
    httpx.post(f"{server.url}/v1/datasets/a/entities", content=body, headers=headers, timeout=600).raise_for_status()


def _measured(server: Server, key: str, seconds: float) -> list[float]:
    """The seconds that each of a tenant's requests takes: an entity written, and read again."""
    times: list[float] = []
    until = time.perf_counter() + seconds
    with server.client(key) as client:
        for number in count():
            if time.perf_counter() >= until:
                return times
            name = f"e{number}"
            for ask in (
                lambda name=name: client.post("/v1/datasets/b/entities", content=_person(name), headers=JSON),
                lambda name=name: client.get(f"/v1/datasets/b/entities/{name}"),
            ):
                begun = time.perf_counter()
                ask().raise_for_status()
                times.append(time.perf_counter() - begun)
    return times


JSON = {"Content-Type": "application/json"}


def _person(name: str) -> bytes:
    return orjson.dumps({"id": name, "schema": "Person", "properties": {"name": [f"Jane {name}"]}})


@contextmanager
def _pressing(server: Server, key: str, load: Load) -> Iterator[dict[str, int]]:
    """A load while the context is open, from a process of its own; then the answers that it had, by status."""
    spawned = multiprocessing.get_context("fork")
    over, told = spawned.Event(), spawned.SimpleQueue()
    child = spawned.Process(target=_send_load, args=(server.url, key, load, over, told))
    child.start()
    found: dict[str, int] = {}
    try:
        yield found
    finally:
        over.set()
        found.update(told.get())
        child.join()


def _send_load(url: str, key: str, load: Load, over: Event, told: Any) -> None:
    os.nice(10)  # it stands for another machine
    host, port = url.removeprefix("http://").split(":")
    requests = load.request()
    answers: dict[socket.socket, bytes] = {}
    statuses: Counter[str] = Counter()

    def send(one: socket.socket) -> None:
        method, path, body = next(requests)
        answers[one] = b""
        one.sendall(
            f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )

    with selectors.DefaultSelector() as ready:
        for _ in range(load.clients):
            one = socket.create_connection((host, int(port)))
            ready.register(one, selectors.EVENT_READ)
            send(one)
        while not over.is_set():
            for selected, _ in ready.select(0.1):
                one = selected.fileobj  # type: ignore[assignment]  # only sockets are registered
                answers[one] += one.recv(1 << 16)
                if _is_complete(answers[one]):
                    statuses[answers[one].split(b" ", 2)[1].decode()] += 1
                    send(one)
        for one in answers:
            one.close()
    told.put(dict(statuses))


def _is_complete(answer: bytes) -> bool:
    head, found, body = answer.partition(b"\r\n\r\n")
    return bool(found) and len(body) >= int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
