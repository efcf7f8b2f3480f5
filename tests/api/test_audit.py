"""The audit log over HTTP: every route that writes leaves its record, and so does every refusal of it."""

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
"""Routes that have a method of those that write, and do not."""

NEVER_DENIED = {
    "flush_datasets": "it flushes what the caller may maintain, which may be nothing",
}
"""Routes that write and have nothing to refuse to a caller that is known."""

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
    """A route, as the OpenAPI document has it."""

    name: str
    method: str
    path: str

    @property
    def filled(self) -> str:
        """Its path with names that nothing has, but for the dataset."""
        return re.sub(r"{\w+}", "nothing", self.path.replace("{dataset}", "test"))


class Setup:
    """The administrator, once as who prepares and once as who does what is looked for in the log."""

    def __init__(self, house: InProcessApi, drop: Path) -> None:
        self.house = house
        self.drop = drop

    def given(self, method: str, path: str, json: Any = None, **options: Any) -> Any:
        """What is there before, as the server answers it."""
        answer = self.house.admin(method, path, **({} if json is None else {"json": json}), **options)
        assert answer.is_success, answer.text
        return answer.json() if answer.content else None

    def statement(self) -> str:
        self.given("POST", f"{DATASET}/entities", ENTITY)
        return f"{DATASET}/statements/{self.given('GET', f'{DATASET}/statements')['results'][0]['id']}"

    def stage(self) -> str:
        return f"{DATASET}/stages/{self.given('POST', f'{DATASET}/stages', {})['id']}"

    def file(self, content: bytes = b"id,name\n1,Jane\n") -> str:
        file = self.given("PUT", f"{DATASET}/files?path=a.csv", content=content)
        return f"{DATASET}/files/{file['checksum']}/{file['id']}"

    def upload(self, content: bytes = b"") -> str:
        upload = f"{DATASET}/uploads/{self.given('POST', f'{DATASET}/uploads', {'length': 3, 'path': 'b'})['id']}"
        if content:
            self.given("PUT", f"{upload}?offset=0", content=content)
        return upload

    def mapping(self) -> str:
        checksum = self.file().split("/")[-2]
        self.given("PUT", f"{DATASET}/mappings/{checksum}", MAPPING)
        return f"{DATASET}/mappings/{checksum}"

    def tenant(self, name: str) -> str:
        self.given("POST", "/v1/admin/tenants", {"name": name})
        return f"/v1/admin/tenants/{name}"

    def key(self, tenant: str) -> str:
        made = self.given("POST", f"{self.tenant(tenant)}/keys", {})
        return f"/v1/admin/keys/{made['id']}"

    def grant(self, tenant: str) -> str:
        made = self.given("POST", f"{self.tenant(tenant)}/grants", {"dataset": "test", "level": "read"})
        return f"/v1/admin/grants/{made['id']}"

    def item(self) -> str:
        return f"{DATASET}/queue/{self.given('POST', f'{DATASET}/queue', ITEM | {'to': 'admin'})['id']}"

    def taken(self) -> tuple[str, str]:
        """An item that was taken, and its token."""
        self.item()
        item = self.given("POST", f"{DATASET}/queue/pop", {})
        return f"{DATASET}/queue/{item['id']}", item["token"]

    def lock(self, name: str) -> str:
        return str(self.given("PUT", f"{DATASET}/locks/{name}", {"ttl": 60})["token"])

    def job(self) -> str:
        return f"/v1/jobs/{self.given('POST', f'{DATASET}/operations/compact')['id']}"


Do = Callable[..., Response]


def _retry_job(desk: Setup, do: Do) -> Response:
    job = desk.job()
    desk.given("DELETE", job)
    return do("POST", f"{job}/retry")


def _pop_queue_item(desk: Setup, do: Do) -> Response:
    desk.item()
    return do("POST", f"{DATASET}/queue/pop", {})


def _force_release_lock(desk: Setup, do: Do) -> Response:
    desk.lock("three")
    return do("DELETE", f"/v1/admin/locks/{desk.given('GET', '/v1/admin/locks')['results'][-1]['id']}")


def _ack_queue_item(desk: Setup, do: Do) -> Response:
    item, token = desk.taken()
    return do("POST", f"{item}/ack", {"token": token})


def _retry_queue_item(desk: Setup, do: Do) -> Response:
    item, token = desk.taken()
    while desk.given("POST", f"{item}/ack", {"token": token, "error": "no"})["state"] != "dead":
        with desk.house.services.database.write() as connection:
            connection.execute(update(queue).values(not_before=None))
        token = desk.given("POST", f"{DATASET}/queue/pop", {})["token"]
    return do("POST", f"{item}/retry")


SUCCESS: dict[str, Callable[[Setup, Do], Response]] = {
    "update_catalog": lambda _, do: do("PATCH", "/v1/catalog", {"title": "Ours"}),
    "create_dataset": lambda _, do: do("POST", "/v1/datasets", {"name": "other"}),
    "update_dataset": lambda _, do: do("PATCH", DATASET, {"title": "Ours"}),
    "delete_dataset": lambda desk, do: (
        desk.given("POST", "/v1/datasets", {"name": "gone"}) and do("DELETE", "/v1/datasets/gone?confirm=gone")
    ),
    "add_entities": lambda _, do: do("POST", f"{DATASET}/entities", ENTITY),
    "put_entity": lambda _, do: do("PUT", f"{DATASET}/entities/jane", ENTITY),
    "delete_entity": lambda _, do: do("DELETE", f"{DATASET}/entities/jane"),
    "add_statements": lambda _, do: do("POST", f"{DATASET}/statements", content=STATEMENT, headers=RECORDS),
    "delete_statement": lambda desk, do: do("DELETE", desk.statement()),
    "delete_origin": lambda _, do: do("DELETE", f"{DATASET}/origins/crawl"),
    "create_stage": lambda _, do: do("POST", f"{DATASET}/stages", {}),
    "stage_entities": lambda desk, do: do("POST", f"{desk.stage()}/entities", ENTITY),
    "stage_statements": lambda desk, do: do("POST", f"{desk.stage()}/statements", content=STATEMENT, headers=RECORDS),
    "commit_stage": lambda desk, do: do("POST", f"{desk.stage()}/commit"),
    "commit_stages": lambda desk, do: do("POST", f"{DATASET}/stages/commit", {"stages": [desk.stage().split("/")[-1]]}),
    "abort_stage": lambda desk, do: do("DELETE", desk.stage()),
    "put_file": lambda _, do: do("PUT", f"{DATASET}/files?path=a", content=b"a"),
    "post_file": lambda _, do: do("POST", f"{DATASET}/files?path=a", files={"file": b"a"}),
    "fetch_file": lambda desk, do: do("POST", f"{DATASET}/files/fetch", {"uri": str(desk.drop / "a.csv")}),
    "delete_file": lambda desk, do: do("DELETE", desk.file()),
    "put_file_text": lambda desk, do: do("PUT", f"{desk.file().rpartition('/')[0]}/text/ocr", content=b"text"),
    "delete_file_text": lambda desk, do: (
        desk.given("PUT", f"{desk.file().rpartition('/')[0]}/text/ocr", content=b"text")
        and do("DELETE", f"{desk.file().rpartition('/')[0]}/text/ocr")
    ),
    "add_file_entity": lambda desk, do: do("POST", f"{desk.file()}/entity"),
    "create_upload": lambda _, do: do("POST", f"{DATASET}/uploads", {"length": 3, "path": "b"}),
    "put_upload_block": lambda desk, do: do("PUT", f"{desk.upload()}?offset=0", content=b"abc"),
    "commit_upload": lambda desk, do: do("POST", f"{desk.upload(b'abc')}/commit"),
    "delete_upload": lambda desk, do: do("DELETE", desk.upload()),
    "put_mapping": lambda _, do: do("PUT", f"{DATASET}/mappings/{'ab' * 32}", MAPPING),
    "process_mapping": lambda desk, do: do("POST", f"{desk.mapping()}/process"),
    "set_ref": lambda _, do: do("PUT", f"{DATASET}/refs/one", {"snapshot": "latest"}),
    "delete_ref": lambda desk, do: (
        desk.given("PUT", f"{DATASET}/refs/two", {"snapshot": "latest"}) and do("DELETE", f"{DATASET}/refs/two")
    ),
    "retry_rejected": lambda _, do: do("POST", f"{DATASET}/journal/rejected/retry"),
    "flush_dataset": lambda _, do: do("POST", f"{DATASET}/operations/flush"),
    "compact_dataset": lambda _, do: do("POST", f"{DATASET}/operations/compact"),
    "optimize_dataset": lambda _, do: do("POST", f"{DATASET}/operations/optimize"),
    "vacuum_dataset": lambda _, do: do("POST", f"{DATASET}/operations/vacuum"),
    "verify_dataset": lambda _, do: do("POST", f"{DATASET}/operations/verify"),
    "revert_dataset": lambda _, do: do("POST", f"{DATASET}/operations/revert", {"to": "1"}),
    "purge_dataset": lambda _, do: do("POST", f"{DATASET}/operations/purge", {"entity_ids": ["a"], "confirm": True}),
    "export_dataset": lambda _, do: do("POST", f"{DATASET}/operations/export", {"kinds": ["statements"]}),
    "make_dataset": lambda _, do: do("POST", f"{DATASET}/operations/make"),
    "crawl_dataset": lambda desk, do: do("POST", f"{DATASET}/operations/crawl", {"uri": str(desk.drop)}),
    "set_tag": lambda _, do: do("PUT", f"{DATASET}/tag?key=one"),
    "delete_tag": lambda desk, do: (
        desk.given("PUT", f"{DATASET}/tag?key=two") and do("DELETE", f"{DATASET}/tag?key=two")
    ),
    "add_queue_item": lambda _, do: do("POST", f"{DATASET}/queue", ITEM),
    "pop_queue_item": _pop_queue_item,
    "ack_queue_item": _ack_queue_item,
    "retry_queue_item": _retry_queue_item,
    "delete_queue_item": lambda desk, do: do("DELETE", desk.item()),
    "take_lock": lambda _, do: do("PUT", f"{DATASET}/locks/one", {"ttl": 60}),
    "release_lock": lambda desk, do: do("DELETE", f"{DATASET}/locks/two?token={desk.lock('two')}"),
    "flush_datasets": lambda _, do: do("POST", "/v1/operations/flush"),
    "retry_job": _retry_job,
    "cancel_job": lambda desk, do: do("DELETE", desk.job()),
    "create_tenant": lambda _, do: do("POST", "/v1/admin/tenants", {"name": "one"}),
    "update_tenant": lambda desk, do: do("PATCH", desk.tenant("two"), {"title": "Two"}),
    "delete_tenant": lambda desk, do: do("DELETE", desk.tenant("three")),
    "create_key": lambda desk, do: do("POST", f"{desk.tenant('four')}/keys", {}),
    "revoke_key": lambda desk, do: do("DELETE", desk.key("five")),
    "create_grant": lambda desk, do: do("POST", f"{desk.tenant('six')}/grants", {"dataset": "test", "level": "read"}),
    "delete_grant": lambda desk, do: do("DELETE", desk.grant("seven")),
    "set_limits": lambda desk, do: do("PUT", f"{desk.tenant('eight')}/limits", {"rate_limit": 5}),
    "set_webhook": lambda desk, do: do("PUT", f"{desk.tenant('nine')}/webhooks", HOOK),
    "delete_webhook": lambda desk, do: (
        desk.given("PUT", f"{desk.tenant('ten')}/webhooks", HOOK) and do("DELETE", "/v1/admin/tenants/ten/webhooks")
    ),
    "force_release_lock": _force_release_lock,
}
"""By operationId: a request that succeeds, after what it needs has been made."""

REFUSED: dict[str, Any] = {"create_dataset": {"name": "test"}}
"""Bodies without which a request of a caller without any grant is not even refused."""


@pytest.fixture
def drop(tmp_path: Path) -> Path:
    folder = tmp_path / "drop"
    folder.mkdir()
    (folder / "a.csv").write_bytes(b"id,name\n")
    return folder


@pytest.fixture
def settings(database_url: str, tmp_path: Path, drop: Path) -> Settings:
    return load_settings(
        database_url=database_url,
        lake_uri=str(tmp_path / "lake"),
        admin_key_file=tmp_path / "admin.key",
        fetch_roots=(drop,),
    )


def operations(house: InProcessApi) -> list[Operation]:
    paths = house.nobody.get("/openapi.json").json()["paths"]
    return [
        Operation(found["operationId"], method, path)
        for path, methods in paths.items()
        for method, found in methods.items()
    ]


def logged(house: InProcessApi, **wanted: Any) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = house.admin.get("/v1/admin/audit", params=wanted).json()["results"]
    return entries


def test_every_route_that_writes_is_tried_or_said_not_to_write(house: InProcessApi):
    writing = {one.name for one in operations(house) if one.method in WRITING}

    assert writing == SUCCESS.keys() | READ_ONLY.keys()
    assert not SUCCESS.keys() & READ_ONLY.keys()


def test_every_route_that_writes_leaves_one_record(house: InProcessApi, dataset: Dataset, flush, drop: Path):
    desk = Setup(house, drop)
    desk.given("POST", f"{DATASET}/entities", ENTITY)
    flush()

    for name, request in SUCCESS.items():

        def do(method: str, path: str, json: Any = None, name: str = name, **options: Any) -> Response:
            headers = {"X-Request-ID": name, **options.pop("headers", {})}
            return house.admin(method, path, headers, **({} if json is None else {"json": json}), **options)

        answer = request(desk, do)

        assert answer.is_success, f"{name}: {answer.text}"
        entries = [
            (entry["tenant"], entry["key"], entry["action"], entry["outcome"]) for entry in logged(house, request=name)
        ]
        assert entries == [("admin", "bootstrap", name, "done")], name


def test_every_refusal_of_a_write_leaves_one_record(house: InProcessApi, dataset: Dataset):
    stranger = house.tenant("stranger")
    key = stranger.get("/v1/whoami").json()["key"]
    writing = [one for one in operations(house) if one.name in SUCCESS.keys() - NEVER_DENIED.keys()]

    for one in writing:
        body = {"json": REFUSED[one.name]} if one.name in REFUSED else {}
        answer = stranger(one.method.upper(), one.filled, {"X-Request-ID": one.name}, **body)

        assert answer.status_code in (403, 404), f"{one.name}: {answer.text}"
        entries = [
            (entry["tenant"], entry["key"], entry["action"], entry["outcome"], entry["detail"]["count"])
            for entry in logged(house, request=one.name)
        ]
        assert entries == [("stranger", key, one.name, "denied", 1)], one.name


def test_every_request_without_a_good_key_leaves_one_record(house: InProcessApi, dataset: Dataset):
    guarded = [one for one in operations(house) if TABLE[one.name].identified]

    for one in guarded:
        answer = house.nobody(one.method.upper(), one.filled, {"X-Request-ID": one.name})

        assert answer.status_code == 401, f"{one.name}: {answer.text}"
    entries = logged(house, outcome="denied", limit=1000)
    assert [(entry["request"], entry["tenant"], entry["key"]) for entry in reversed(entries)] == [
        (one.name, None, None) for one in guarded
    ]


def _wrong_secret(house: InProcessApi, caller: Caller) -> str:
    return f"{str(caller.key)[:-4]}AAAA"


def _revoked(house: InProcessApi, caller: Caller) -> str:
    house.admin.delete(f"/v1/admin/keys/{caller.get('/v1/whoami').json()['key']}")
    return str(caller.key)


def _expired(house: InProcessApi, caller: Caller) -> str:
    caller.get("/v1/whoami")
    with house.services.database.write() as connection:
        gone = now() - timedelta(seconds=1)
        connection.execute(update(api_keys).where(api_keys.c.tenant == "alice").values(expires=gone))
    house.admin.patch("/v1/admin/tenants/alice", {"title": "known anew"})
    return str(caller.key)


def _disabled(house: InProcessApi, caller: Caller) -> str:
    house.admin.patch("/v1/admin/tenants/alice", {"disabled": True})
    return str(caller.key)


@pytest.mark.parametrize("refused", [_wrong_secret, _revoked, _expired, _disabled])
def test_refusal_of_a_key_that_is_ours_names_the_key_and_no_tenant(house: InProcessApi, refused):
    alice = house.tenant("alice")
    key = alice.get("/v1/whoami").json()["key"]

    answer = house.with_key(refused(house, alice)).get("/v1/datasets")

    assert answer.status_code == 401
    assert key not in answer.text
    [entry] = logged(house, outcome="denied")
    assert (entry["key"], entry["tenant"], entry["action"]) == (key, None, "list_datasets")
    assert alice.key is not None
    assert alice.key not in str(logged(house))


def test_key_that_was_never_ours_is_not_kept(house: InProcessApi):
    house.with_key("tarn_madeup_secret").get("/v1/whoami")

    [entry] = logged(house, outcome="denied")
    assert (entry["key"], "madeup" in str(entry)) == (None, False)


def test_denial_of_what_another_tenant_has_is_in_the_log(house: InProcessApi, dataset: Dataset):
    alice, bob = house.tenant("alice", test="write"), house.tenant("bob", test="write")
    upload = alice.post(f"{DATASET}/uploads", {"length": 3, "path": "b"}).json()["id"]
    stage = alice.post(f"{DATASET}/stages", {}).json()["id"]

    for path in (f"{DATASET}/uploads/{upload}", f"{DATASET}/stages/{stage}"):
        assert bob.get(path).status_code == 404

    assert [entry["target"] for entry in logged(house, tenant="bob")] == [
        f"{DATASET}/stages/{stage}",
        f"{DATASET}/uploads/{upload}",
    ]


def test_log_is_filtered_by_what_an_entry_says(house: InProcessApi, dataset: Dataset):
    alice = house.tenant("alice", test="write", testing="write")
    house.dataset("testing")
    key = alice.get("/v1/whoami").json()["key"]
    alice.post(f"{DATASET}/entities", ENTITY, headers={"X-Request-ID": "r-1"})
    alice.post("/v1/datasets/testing/entities", ENTITY)
    alice.put(f"{DATASET}/files?path=a", content=b"a")
    alice.patch(DATASET, {"title": "mine"})
    moments = [entry["at"] for entry in logged(house)]

    def actions(**wanted: Any) -> list[str]:
        return [entry["action"] for entry in reversed(logged(house, **wanted))]

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
        assert house.admin.get("/v1/admin/audit", params=wrong).status_code == 422


def test_worker_trims_the_log_to_what_is_kept(house: InProcessApi):
    house.dataset("test")
    kept = len(logged(house))

    make_worker(house)._sweep()
    assert len(logged(house)) == kept
    make_worker(house, audit_days=1e-9)._sweep()

    assert logged(house) == []
