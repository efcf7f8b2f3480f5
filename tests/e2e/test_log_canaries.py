"""What goes through the API is in no log of it, nor of its worker, however much they are told to say."""

import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from shutil import copyfile

import httpx

from tests.isolation.prepared_lake import HELD, built
from tests.isolation.route_requests import UnsentRequest, operations_in, valid_request
from tests.isolation.routes import ROUTES
from tests.server import running

CANARY = "qzlogcanaryqz"
KEY = f"administrator-{CANARY}"


def hiding(asked: UnsentRequest) -> Iterator[UnsentRequest]:
    """A request with a canary in every place but its path, which is in the log by right; one place at a time."""
    for name in (*asked.place.parameters["query"], "unknown"):
        yield replace(asked, query={**asked.query, name: CANARY})
    for name in (*asked.place.parameters["header"], "Accept", "Cookie"):
        yield replace(asked, headers={**asked.headers, name: CANARY})
    yield replace(asked, headers={**asked.headers, "Authorization": f"Bearer tarn_{CANARY}_{CANARY}"})
    if asked.body is not None:
        yield replace(asked, body=f'{{"{CANARY}": "{CANARY}'.encode())
        yield replace(asked, body=f'{{"{CANARY}": "{CANARY}"}}'.encode())


def test_canaries_through_every_route_are_in_no_log(sqlite: Path, kernel_process: ProcessPoolExecutor):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copyfile(sqlite, folder / "tarn.db")
        with built(folder, f"sqlite:///{folder}/tarn.db", kernel_process) as world:
            places = operations_in(world.house.nobody.get("/openapi.json").json())
            requests = {}
            for operation, route in ROUTES.items():
                things = world.things("administrator", HELD)
                things["value"] = CANARY
                requests[operation] = valid_request(route, places[operation], things)
        settings = {
            "TARN_DATABASE_URL": f"sqlite:///{folder}/tarn.db",
            "TARN_LAKE_URI": str(folder / "lake"),
            "TARN_FETCH_ROOTS": str(folder / "sources"),
            "TARN_ADMIN_KEY": KEY,
            "TARN_COMMIT_WAIT": "0.01",
            "TARN_EVENT_LONGEST": "0.2",
            "TARN_LOG_LEVEL": "debug",
        }
        with running(folder, "serve", **settings) as server, httpx.Client(base_url=server.url, timeout=300) as client:

            def send(one: UnsentRequest) -> httpx.Response:
                headers = {"Authorization": f"Bearer {KEY}"} | dict(one.headers)
                return client.request(
                    one.place.method, one.url, params=dict(one.query), headers=headers, content=one.body
                )

            good = {operation: send(asked) for operation, asked in requests.items()}
            refused = Counter(send(one).status_code for asked in requests.values() for one in hiding(asked))
            jobs = [
                answer.headers["Location"] for answer in good.values() if "/jobs/" in answer.headers.get("Location", "")
            ]
            admin = {"Authorization": f"Bearer {KEY}"}
            over = Counter(client.get(f"{job}?wait=240", headers=admin).json()["state"] for job in jobs)
        log = server.log.read_text()

    statuses = {operation: answer.status_code for operation, answer in good.items()}
    assert {name: status for name, status in statuses.items() if status not in places[name].success} == {}
    assert (len(jobs) > 10, over["done"] > 8) == (True, True), over
    assert refused[401] > 100
    assert CANARY in good["update_dataset"].text
    assert good["put_file"].json()["size"] == len(CANARY)
    assert good["add_entities"].json()["entities"] == 1
    assert "job over" in log
    assert [line for line in log.splitlines() if CANARY in line] == []
