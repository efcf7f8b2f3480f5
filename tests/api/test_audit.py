"""The audit log over HTTP: every writing route and every refusal of one adds a record."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from httpx2 import Response
from sqlalchemy import update
from tarn.api.http.route_access import TABLE
from tarn.datasets.registry import Dataset
from tarn.db.tables import api_keys, queue
from tarn.model.ids import now
from tarn.settings import Settings, load_settings

from tests.in_process_api import ONE_DATABASE, Caller, InProcessApi
from tests.worker.workers import make_worker

pytestmark = ONE_DATABASE

WRITING = ("post", "put", "patch", "delete")

READ_ONLY = {
    "query_entities": "a query with a body",
    "aggregate_entities": "a query with a body",
    "query_datasets": "a query with a body",
    "aggregate_datasets": "a query with a body",
}
"""Routes with a method that usually writes, which do not write."""

NEVER_DENIED = {
    "flush_datasets": "it flushes what the caller may maintain, which may be nothing",
}
"""Writing routes that refuse nothing to an authenticated caller."""

ENTITY = {"id": "jane", "schema": "Person", "properties": {"name": ["Jane Doe"]}}
STATEMENT = b'{"entity_id": "jane", "schema": "Person", "prop": "name", "value": "Jane Doe"}'
PERSON = {"schema": "Person", "key": "id", "properties": {"name": {"column": "name"}}}
MAPPING = {"csv_url": "http://127.0.0.1:9/data.csv", "entities": {"person": PERSON}}
ITEM = {"action": "UPSERT", "resource": "entity", "payload": ENTITY}
HOOK = {"url": "https://example.org/hook", "secret": "of at least sixteen letters"}
RECORDS = {"Content-Type": "application/x-ndjson"}
DATASET = "/v1/datasets/test"


@dataclass(frozen=True)
class Operation:
    """A route as described in the OpenAPI document."""

    name: str
    method: str
    path: str

    @property
    def example_path(self) -> str:
        """Return its path with names that do not exist, except the dataset's."""
        return re.sub(r"{\w+}", "nothing", self.path.replace("{dataset}", "test"))


class Setup:
    """Creates the prerequisites of requests, as the administrator."""

    def __init__(self, api: InProcessApi, source: Path) -> None:
        self.api = api
        self.source = source

    def call(self, method: str, path: str, json: Any = None, **options: Any) -> Any:
        """Send a successful request and return the document of its response."""
        response = self.api.admin(method, path, **({} if json is None else {"json": json}), **options)
        assert response.is_success, response.text
        return response.json() if response.content else None

    def statement(self) -> str:
        self.call("POST", f"{DATASET}/entities", ENTITY)
        return f"{DATASET}/statements/{self.call('GET', f'{DATASET}/statements')['results'][0]['id']}"

    def stage(self) -> str:
        return f"{DATASET}/stages/{self.call('POST', f'{DATASET}/stages', {})['id']}"

    def file(self, content: bytes = b"id,name\n1,Jane\n") -> str:
        file = self.call("PUT", f"{DATASET}/files?path=a.csv", content=content)
        return f"{DATASET}/files/{file['checksum']}/{file['id']}"

    def upload(self, content: bytes = b"") -> str:
        upload = f"{DATASET}/uploads/{self.call('POST', f'{DATASET}/uploads', {'length': 3, 'path': 'b'})['id']}"
        if content:
            self.call("PUT", f"{upload}?offset=0", content=content)
        return upload

    def mapping(self) -> str:
        checksum = self.file().split("/")[-2]
        self.call("PUT", f"{DATASET}/mappings/{checksum}", MAPPING)
        return f"{DATASET}/mappings/{checksum}"

    def tenant(self, name: str) -> str:
        self.call("POST", "/v1/admin/tenants", {"name": name})
        return f"/v1/admin/tenants/{name}"

    def key(self, tenant: str) -> str:
        response = self.call("POST", f"{self.tenant(tenant)}/keys", {})
        return f"/v1/admin/keys/{response['id']}"

    def grant(self, tenant: str) -> str:
        response = self.call("POST", f"{self.tenant(tenant)}/grants", {"dataset": "test", "level": "read"})
        return f"/v1/admin/grants/{response['id']}"

    def item(self) -> str:
        return f"{DATASET}/queue/{self.call('POST', f'{DATASET}/queue', ITEM | {'to': 'admin'})['id']}"

    def popped(self) -> tuple[str, str]:
        """Return a queue item that was popped, and its token."""
        self.item()
        item = self.call("POST", f"{DATASET}/queue/pop", {})
        return f"{DATASET}/queue/{item['id']}", item["token"]

    def lock(self, name: str) -> str:
        return str(self.call("PUT", f"{DATASET}/locks/{name}", {"ttl": 60})["token"])

    def job(self) -> str:
        return f"/v1/jobs/{self.call('POST', f'{DATASET}/operations/compact')['id']}"


Send = Callable[..., Response]


def _retry_job(setup: Setup, send: Send) -> Response:
    job = setup.job()
    setup.call("DELETE", job)
    return send("POST", f"{job}/retry")


def _pop_queue_item(setup: Setup, send: Send) -> Response:
    setup.item()
    return send("POST", f"{DATASET}/queue/pop", {})


def _force_release_lock(setup: Setup, send: Send) -> Response:
    setup.lock("three")
    return send("DELETE", f"/v1/admin/locks/{setup.call('GET', '/v1/admin/locks')['results'][-1]['id']}")


def _ack_queue_item(setup: Setup, send: Send) -> Response:
    item, token = setup.popped()
    return send("POST", f"{item}/ack", {"token": token})


def _retry_queue_item(setup: Setup, send: Send) -> Response:
    item, token = setup.popped()
    while setup.call("POST", f"{item}/ack", {"token": token, "error": "no"})["state"] != "dead":
        with setup.api.services.database.write() as connection:
            connection.execute(update(queue).values(not_before=None))
        token = setup.call("POST", f"{DATASET}/queue/pop", {})["token"]
    return send("POST", f"{item}/retry")


SUCCESS: dict[str, Callable[[Setup, Send], Response]] = {
    "update_catalog": lambda _, send: send("PATCH", "/v1/catalog", {"title": "Ours"}),
    "create_dataset": lambda _, send: send("POST", "/v1/datasets", {"name": "other"}),
    "update_dataset": lambda _, send: send("PATCH", DATASET, {"title": "Ours"}),
    "delete_dataset": lambda setup, send: (
        setup.call("POST", "/v1/datasets", {"name": "gone"}) and send("DELETE", "/v1/datasets/gone?confirm=gone")
    ),
    "add_entities": lambda _, send: send("POST", f"{DATASET}/entities", ENTITY),
    "put_entity": lambda _, send: send("PUT", f"{DATASET}/entities/jane", ENTITY),
    "delete_entity": lambda _, send: send("DELETE", f"{DATASET}/entities/jane"),
    "add_statements": lambda _, send: send("POST", f"{DATASET}/statements", content=STATEMENT, headers=RECORDS),
    "delete_statement": lambda setup, send: send("DELETE", setup.statement()),
    "delete_origin": lambda _, send: send("DELETE", f"{DATASET}/origins/crawl"),
    "create_stage": lambda _, send: send("POST", f"{DATASET}/stages", {}),
    "stage_entities": lambda setup, send: send("POST", f"{setup.stage()}/entities", ENTITY),
    "stage_statements": lambda setup, send: send(
        "POST", f"{setup.stage()}/statements", content=STATEMENT, headers=RECORDS
    ),
    "commit_stage": lambda setup, send: send("POST", f"{setup.stage()}/commit"),
    "commit_stages": lambda setup, send: send(
        "POST", f"{DATASET}/stages/commit", {"stages": [setup.stage().split("/")[-1]]}
    ),
    "abort_stage": lambda setup, send: send("DELETE", setup.stage()),
    "put_file": lambda _, send: send("PUT", f"{DATASET}/files?path=a", content=b"a"),
    "post_file": lambda _, send: send("POST", f"{DATASET}/files?path=a", files={"file": b"a"}),
    "fetch_file": lambda setup, send: send("POST", f"{DATASET}/files/fetch", {"uri": str(setup.source / "a.csv")}),
    "delete_file": lambda setup, send: send("DELETE", setup.file()),
    "put_file_text": lambda setup, send: send("PUT", f"{setup.file().rpartition('/')[0]}/text/ocr", content=b"text"),
    "delete_file_text": lambda setup, send: (
        setup.call("PUT", f"{setup.file().rpartition('/')[0]}/text/ocr", content=b"text")
        and send("DELETE", f"{setup.file().rpartition('/')[0]}/text/ocr")
    ),
    "add_file_entity": lambda setup, send: send("POST", f"{setup.file()}/entity"),
    "create_upload": lambda _, send: send("POST", f"{DATASET}/uploads", {"length": 3, "path": "b"}),
    "put_upload_block": lambda setup, send: send("PUT", f"{setup.upload()}?offset=0", content=b"abc"),
    "commit_upload": lambda setup, send: send("POST", f"{setup.upload(b'abc')}/commit"),
    "delete_upload": lambda setup, send: send("DELETE", setup.upload()),
    "put_mapping": lambda _, send: send("PUT", f"{DATASET}/mappings/{'ab' * 32}", MAPPING),
    "process_mapping": lambda setup, send: send("POST", f"{setup.mapping()}/process"),
    "set_ref": lambda _, send: send("PUT", f"{DATASET}/refs/one", {"snapshot": "latest"}),
    "delete_ref": lambda setup, send: (
        setup.call("PUT", f"{DATASET}/refs/two", {"snapshot": "latest"}) and send("DELETE", f"{DATASET}/refs/two")
    ),
    "retry_rejected": lambda _, send: send("POST", f"{DATASET}/journal/rejected/retry"),
    "flush_dataset": lambda _, send: send("POST", f"{DATASET}/operations/flush"),
    "compact_dataset": lambda _, send: send("POST", f"{DATASET}/operations/compact"),
    "optimize_dataset": lambda _, send: send("POST", f"{DATASET}/operations/optimize"),
    "vacuum_dataset": lambda _, send: send("POST", f"{DATASET}/operations/vacuum"),
    "verify_dataset": lambda _, send: send("POST", f"{DATASET}/operations/verify"),
    "revert_dataset": lambda _, send: send("POST", f"{DATASET}/operations/revert", {"to": "1"}),
    "purge_dataset": lambda _, send: send(
        "POST", f"{DATASET}/operations/purge", {"entity_ids": ["a"], "confirm": True}
    ),
    "export_dataset": lambda _, send: send("POST", f"{DATASET}/operations/export", {"kinds": ["statements"]}),
    "make_dataset": lambda _, send: send("POST", f"{DATASET}/operations/make"),
    "crawl_dataset": lambda setup, send: send("POST", f"{DATASET}/operations/crawl", {"uri": str(setup.source)}),
    "set_tag": lambda _, send: send("PUT", f"{DATASET}/tag?key=one"),
    "delete_tag": lambda setup, send: (
        setup.call("PUT", f"{DATASET}/tag?key=two") and send("DELETE", f"{DATASET}/tag?key=two")
    ),
    "add_queue_item": lambda _, send: send("POST", f"{DATASET}/queue", ITEM),
    "pop_queue_item": _pop_queue_item,
    "ack_queue_item": _ack_queue_item,
    "retry_queue_item": _retry_queue_item,
    "delete_queue_item": lambda setup, send: send("DELETE", setup.item()),
    "take_lock": lambda _, send: send("PUT", f"{DATASET}/locks/one", {"ttl": 60}),
    "release_lock": lambda setup, send: send("DELETE", f"{DATASET}/locks/two?token={setup.lock('two')}"),
    "flush_datasets": lambda _, send: send("POST", "/v1/operations/flush"),
    "retry_job": _retry_job,
    "cancel_job": lambda setup, send: send("DELETE", setup.job()),
    "create_tenant": lambda _, send: send("POST", "/v1/admin/tenants", {"name": "one"}),
    "update_tenant": lambda setup, send: send("PATCH", setup.tenant("two"), {"title": "Two"}),
    "delete_tenant": lambda setup, send: send("DELETE", setup.tenant("three")),
    "create_key": lambda setup, send: send("POST", f"{setup.tenant('four')}/keys", {}),
    "revoke_key": lambda setup, send: send("DELETE", setup.key("five")),
    "create_grant": lambda setup, send: send(
        "POST", f"{setup.tenant('six')}/grants", {"dataset": "test", "level": "read"}
    ),
    "delete_grant": lambda setup, send: send("DELETE", setup.grant("seven")),
    "set_limits": lambda setup, send: send("PUT", f"{setup.tenant('eight')}/limits", {"rate_limit": 5}),
    "set_webhook": lambda setup, send: send("PUT", f"{setup.tenant('nine')}/webhooks", HOOK),
    "delete_webhook": lambda setup, send: (
        setup.call("PUT", f"{setup.tenant('ten')}/webhooks", HOOK) and send("DELETE", "/v1/admin/tenants/ten/webhooks")
    ),
    "force_release_lock": _force_release_lock,
}
"""By operationId: a request that succeeds, sent after its prerequisites have been created."""

REFUSED: dict[str, Any] = {"create_dataset": {"name": "test"}}
"""Bodies that must be valid for a request of a caller without grants to reach the access check."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "a.csv").write_bytes(b"id,name\n")
    return folder


@pytest.fixture
def settings(database_url: str, tmp_path: Path, source: Path) -> Settings:
    return load_settings(
        database_url=database_url,
        lake_uri=str(tmp_path / "lake"),
        admin_key_file=tmp_path / "admin.key",
        fetch_roots=(source,),
    )


def operations(api: InProcessApi) -> list[Operation]:
    paths = api.anonymous.get("/openapi.json").json()["paths"]
    return [
        Operation(item["operationId"], method, path)
        for path, methods in paths.items()
        for method, item in methods.items()
    ]


def logged(api: InProcessApi, **filters: Any) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = api.admin.get("/v1/admin/audit", params=filters).json()["results"]
    return entries


def test_every_route_with_a_writing_method_is_tested_or_listed_as_read_only(api: InProcessApi):
    writing = {one.name for one in operations(api) if one.method in WRITING}

    assert writing == SUCCESS.keys() | READ_ONLY.keys()
    assert not SUCCESS.keys() & READ_ONLY.keys()


def test_every_route_that_writes_leaves_one_record(api: InProcessApi, dataset: Dataset, flush, source: Path):
    setup = Setup(api, source)
    setup.call("POST", f"{DATASET}/entities", ENTITY)
    flush()

    for name, request in SUCCESS.items():

        def send(method: str, path: str, json: Any = None, name: str = name, **options: Any) -> Response:
            headers = {"X-Request-ID": name, **options.pop("headers", {})}
            return api.admin(method, path, headers, **({} if json is None else {"json": json}), **options)

        response = request(setup, send)

        assert response.is_success, f"{name}: {response.text}"
        entries = [
            (entry["tenant"], entry["key"], entry["action"], entry["outcome"]) for entry in logged(api, request=name)
        ]
        assert entries == [("admin", "bootstrap", name, "done")], name


def test_every_refusal_of_a_write_leaves_one_record(api: InProcessApi, dataset: Dataset):
    stranger = api.tenant("stranger")
    key = stranger.get("/v1/whoami").json()["key"]
    writing = [one for one in operations(api) if one.name in SUCCESS.keys() - NEVER_DENIED.keys()]

    for one in writing:
        body = {"json": REFUSED[one.name]} if one.name in REFUSED else {}
        response = stranger(one.method.upper(), one.example_path, {"X-Request-ID": one.name}, **body)

        assert response.status_code in (403, 404), f"{one.name}: {response.text}"
        entries = [
            (entry["tenant"], entry["key"], entry["action"], entry["outcome"], entry["detail"]["count"])
            for entry in logged(api, request=one.name)
        ]
        assert entries == [("stranger", key, one.name, "denied", 1)], one.name


def test_every_request_without_a_good_key_leaves_one_record(api: InProcessApi, dataset: Dataset):
    guarded = [one for one in operations(api) if TABLE[one.name].identified]

    for one in guarded:
        response = api.anonymous(one.method.upper(), one.example_path, {"X-Request-ID": one.name})

        assert response.status_code == 401, f"{one.name}: {response.text}"
    entries = logged(api, outcome="denied", limit=1000)
    assert [(entry["request"], entry["tenant"], entry["key"]) for entry in reversed(entries)] == [
        (one.name, None, None) for one in guarded
    ]


def _wrong_secret(api: InProcessApi, caller: Caller) -> str:
    return f"{str(caller.key)[:-4]}AAAA"


def _revoked(api: InProcessApi, caller: Caller) -> str:
    api.admin.delete(f"/v1/admin/keys/{caller.get('/v1/whoami').json()['key']}")
    return str(caller.key)


def _expired(api: InProcessApi, caller: Caller) -> str:
    caller.get("/v1/whoami")
    with api.services.database.write() as connection:
        past = now() - timedelta(seconds=1)
        connection.execute(update(api_keys).where(api_keys.c.tenant == "alice").values(expires=past))
    api.admin.patch("/v1/admin/tenants/alice", {"title": "reloaded"})
    return str(caller.key)


def _disabled(api: InProcessApi, caller: Caller) -> str:
    api.admin.patch("/v1/admin/tenants/alice", {"disabled": True})
    return str(caller.key)


@pytest.mark.parametrize("refused", [_wrong_secret, _revoked, _expired, _disabled])
def test_refusal_of_a_known_key_names_the_key_and_no_tenant(api: InProcessApi, refused):
    alice = api.tenant("alice")
    key = alice.get("/v1/whoami").json()["key"]

    response = api.with_key(refused(api, alice)).get("/v1/datasets")

    assert response.status_code == 401
    assert key not in response.text
    [entry] = logged(api, outcome="denied")
    assert (entry["key"], entry["tenant"], entry["action"]) == (key, None, "list_datasets")
    assert alice.key is not None
    assert alice.key not in str(logged(api))


def test_unknown_key_is_not_recorded(api: InProcessApi):
    api.with_key("tarn_madeup_secret").get("/v1/whoami")

    [entry] = logged(api, outcome="denied")
    assert (entry["key"], "madeup" in str(entry)) == (None, False)


def test_denial_of_access_to_another_tenants_object_is_in_the_log(api: InProcessApi, dataset: Dataset):
    alice, bob = api.tenant("alice", test="write"), api.tenant("bob", test="write")
    upload = alice.post(f"{DATASET}/uploads", {"length": 3, "path": "b"}).json()["id"]
    stage = alice.post(f"{DATASET}/stages", {}).json()["id"]

    for path in (f"{DATASET}/uploads/{upload}", f"{DATASET}/stages/{stage}"):
        assert bob.get(path).status_code == 404

    assert [entry["target"] for entry in logged(api, tenant="bob")] == [
        f"{DATASET}/stages/{stage}",
        f"{DATASET}/uploads/{upload}",
    ]


def test_log_is_filtered_by_the_fields_of_an_entry(api: InProcessApi, dataset: Dataset):
    alice = api.tenant("alice", test="write", testing="write")
    api.dataset("testing")
    key = alice.get("/v1/whoami").json()["key"]
    alice.post(f"{DATASET}/entities", ENTITY, headers={"X-Request-ID": "r-1"})
    alice.post("/v1/datasets/testing/entities", ENTITY)
    alice.put(f"{DATASET}/files?path=a", content=b"a")
    alice.patch(DATASET, {"title": "mine"})
    moments = [entry["at"] for entry in logged(api)]

    def actions(**filters: Any) -> list[str]:
        return [entry["action"] for entry in reversed(logged(api, **filters))]

    assert actions(tenant="alice") == actions(key=key) == ["add_entities", "add_entities", "put_file", "update_dataset"]
    assert actions(request="r-1") == ["add_entities"]
    assert actions(outcome="denied") == ["update_dataset"]
    assert actions(dataset="test") == ["create_dataset", "add_entities", "put_file", "update_dataset"]
    assert actions(dataset="test", action="put_file") == ["put_file"]
    assert actions(dataset="nothing") == []
    assert len(actions(since=moments[-1])) == len(moments)
    assert actions(until="2020-01-01T00:00:00Z") == actions(since="2120-01-01T00:00:00Z") == []
    for wrong in (
        {"since": "yesterday"},
        {"outcome": "maybe"},
        {"key": "a\x00"},
        {"request": "a b"},
        {"until": "0001-01-01T00:00:00Z"},
    ):
        assert api.admin.get("/v1/admin/audit", params=wrong).status_code == 422


def test_worker_trims_the_log_to_its_retention(api: InProcessApi):
    api.dataset("test")
    before = len(logged(api))

    make_worker(api)._sweep()
    assert len(logged(api)) == before
    make_worker(api, audit_days=1e-9)._sweep()

    assert logged(api) == []
