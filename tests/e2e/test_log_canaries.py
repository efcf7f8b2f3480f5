"""Request content appears in no log of the API or its worker, at any log level."""

import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from shutil import copyfile

import httpx
import pytest

from tests.isolation.prepared_lake import SHARED, prepare_lake
from tests.isolation.route_requests import UnsentRequest, operations_in, valid_request
from tests.isolation.routes import ROUTES
from tests.server import running

pytestmark = pytest.mark.long

CANARY = "qzlogcanaryqz"
KEY = f"administrator-{CANARY}"


def hiding(request: UnsentRequest) -> Iterator[UnsentRequest]:
    """Yield requests with a canary in one place at a time, except the path, which may be logged."""
    for name in (*request.operation.parameters["query"], "unknown"):
        yield replace(request, query={**request.query, name: CANARY})
    for name in (*request.operation.parameters["header"], "Accept", "Cookie"):
        yield replace(request, headers={**request.headers, name: CANARY})
    yield replace(request, headers={**request.headers, "Authorization": f"Bearer tarn_{CANARY}_{CANARY}"})
    if request.body is not None:
        yield replace(request, body=f'{{"{CANARY}": "{CANARY}'.encode())
        yield replace(request, body=f'{{"{CANARY}": "{CANARY}"}}'.encode())


def test_canaries_sent_through_every_route_appear_in_no_log(sqlite: Path, kernel_process: ProcessPoolExecutor):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copyfile(sqlite, folder / "tarn.db")
        with prepare_lake(folder, f"sqlite:///{folder}/tarn.db", kernel_process) as lake:
            operations = operations_in(lake.api.anonymous.get("/openapi.json").json())
            requests = {}
            for operation, route in ROUTES.items():
                resources = lake.resources("administrator", SHARED)
                resources["value"] = CANARY
                requests[operation] = valid_request(route, operations[operation], resources)
        settings = {
            "TARN_DATABASE_URL": f"sqlite:///{folder}/tarn.db",
            "TARN_LAKE_URI": str(folder / "lake"),
            "TARN_FETCH_ROOTS": str(folder / "sources"),
            "TARN_ADMIN_KEY": KEY,
            "TARN_COMMIT_WAIT": "0.01",
            "TARN_EVENT_MAX_SECONDS": "0.2",
            "TARN_LOG_LEVEL": "debug",
        }
        with running(folder, "serve", **settings) as server, httpx.Client(base_url=server.url, timeout=300) as client:

            def send(one: UnsentRequest) -> httpx.Response:
                headers = {"Authorization": f"Bearer {KEY}"} | dict(one.headers)
                return client.request(
                    one.operation.method, one.url, params=dict(one.query), headers=headers, content=one.body
                )

            responses = {operation: send(request) for operation, request in requests.items()}
            refused = Counter(send(one).status_code for request in requests.values() for one in hiding(request))
            jobs = [
                response.headers["Location"]
                for response in responses.values()
                if "/jobs/" in response.headers.get("Location", "")
            ]
            admin = {"Authorization": f"Bearer {KEY}"}
            states = Counter(client.get(f"{job}?wait=240", headers=admin).json()["state"] for job in jobs)
        log = server.log.read_text()

    statuses = {operation: response.status_code for operation, response in responses.items()}
    assert {name: status for name, status in statuses.items() if status not in operations[name].success} == {}
    assert (len(jobs) > 10, states["done"] > 8) == (True, True), states
    assert refused[401] > 100
    assert CANARY in responses["update_dataset"].text
    assert responses["put_file"].json()["size"] == len(CANARY)
    assert responses["add_entities"].json()["entities"] == 1
    assert "job over" in log
    assert [line for line in log.splitlines() if CANARY in line] == []
