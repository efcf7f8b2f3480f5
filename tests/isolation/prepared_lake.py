"""A prepared lake with resources of every kind; all data of one tenant contains a mark that no other may see."""

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from httpx2 import Response
from sqlalchemy import delete, select, update
from tarn.access.bootstrap import ensure_admin
from tarn.datasets.registry import Dataset, find
from tarn.db import jobs
from tarn.db.engine import Database
from tarn.db.tables import datasets as dataset_table
from tarn.db.tables import idempotency, journal_batches, metadata, queue
from tarn.main import build_services
from tarn.model.datasets.export import ExportKind
from tarn.model.names import DatasetName, TenantName
from tarn.model.work.job import ExportOptions, Operation
from tarn.settings import load_settings
from tarn.storage.connection import Connection
from tarn.storage.lake_root import open_lake
from tarn.storage.store import Store

from tests.in_process_api import Caller, InProcessApi
from tests.pipeline.kernels import DirectKernels
from tests.pipeline.test_export import exports_of
from tests.pipeline.test_rewrite import ignore

MARK = "qzcanaryqz"
"""Part of every string that the tenant `owner` sends; valid in a dataset name and in a header."""

SHARED, UNRELATED, OWNED = "shared", "unrelated", f"owned_{MARK}"
"""The dataset on which every role has its level, the unrelated tenant's, and the one that only its owner may see."""

LEVELS = {"reader": "read", "writer": "write", "maintainer": "maintain", "manager": "admin"}
"""Roles: one tenant each, with this level on `shared` and on every dataset whose name begins with it."""

REQUEST_TABLES = {"access_revision", "audit", "idempotency", "readers", "workers"}
"""Tables about requests and processes, which a refused request may change."""


class Resources(dict[str, str]):
    """Ids of one tenant's resources in one dataset, by their names in paths; each is created on first access."""

    def __init__(
        self, lake: "PreparedLake", caller: Caller, tenant: str, dataset: str, shared: "Resources | None" = None
    ) -> None:
        super().__init__(dataset=dataset, tenant=tenant, slug="internal", value="Eve", mark=_mark(dataset))
        self._prepared = lake
        self._caller = caller
        self._shared = shared

    @property
    def path(self) -> str:
        return f"/v1/datasets/{self['dataset']}"

    def __missing__(self, name: str) -> str:
        create = getattr(self, f"_{name}")
        is_own = self._shared is None or name in TENANT_RESOURCES or name in TENANT_NAMESPACES
        self[name] = create() if is_own or self._shared is None else self._shared[name]
        return self[name]

    def _entity(self) -> str:
        return f"ada-{self['mark']}"

    def _text_origin(self) -> str:
        return f"ocr-{self['mark']}"

    def _origin(self) -> str:
        return f"crawl-{self['mark']}"

    def _statement(self) -> str:
        return self._prepared.statements[self["dataset"]]

    def _file_path(self) -> str:
        return f"papers/{self['mark']}-{next(self._prepared.numbers)}.csv"

    def _checksum(self) -> str:
        body = f"id,name\n{self['mark']},{next(self._prepared.numbers)}\n".encode()
        response = _success(
            self._prepared.put_bytes(self._caller, f"{self.path}/files?path={self['file_path']}", body)
        ).json()
        self["file"] = response["id"]
        text = f"{self.path}/files/{response['checksum']}/text/{self['text_origin']}"
        _success(self._prepared.put_bytes(self._caller, text, f"text {self['mark']}".encode()))
        return str(response["checksum"])

    def _file(self) -> str:
        self["checksum"] = self._checksum()
        return self["file"]

    def _content_hash(self) -> str:
        for title in ("first", "second"):
            entities = {f"{title}_{self['mark']}": ENTITY_MAPPING}
            _success(self._caller.put(f"{self.path}/mappings/{self['checksum']}", {"entities": entities}))
        return self["checksum"]

    def _mapping_version(self) -> str:
        response = _success(self._caller.get(f"{self.path}/mappings/{self['content_hash']}/versions"))
        return str(response.json()["results"][0]["timestamp"])

    def _version(self) -> str:
        _success(self._caller.patch(self.path, {"title": f"title {next(self._prepared.numbers)} {self['mark']}"}))
        response = _success(self._caller.get(f"{self.path}/versions")).json()["results"]
        return str(next(version["timestamp"] for version in response if version["name"] == "config.yml"))

    def _stage(self) -> str:
        response = self._caller.post(f"{self.path}/stages", {"origin": self["origin"], "message": self["mark"]})
        return str(_success(response).json()["id"])

    def _filled_stage(self) -> str:
        stage = self._stage()
        _success(self._caller.post(f"{self.path}/stages/{stage}/entities", person("staged", self["mark"])))
        return stage

    def _upload(self) -> str:
        response = _success(self._caller.post(f"{self.path}/uploads", {"length": 4, "path": self._file_path()})).json()
        return str(response["id"])

    def _filled_upload(self) -> str:
        upload = self._upload()
        _success(self._prepared.put_bytes(self._caller, f"{self.path}/uploads/{upload}?offset=0", b"abcd"))
        return upload

    def _snapshot(self) -> str:
        return str(_success(self._caller.get(f"{self.path}/snapshots/latest")).json()["id"])

    def _ref(self) -> str:
        name = f"ref-{self['mark']}-{next(self._prepared.numbers)}"
        _success(self._caller.put(f"{self.path}/refs/{name}", {"snapshot": self["snapshot"]}))
        return name

    def _job(self) -> str:
        return self._prepared.job(self["tenant"], self["dataset"])

    def _cancelled_job(self) -> str:
        job = self._job()
        with self._prepared.api.services.database.write() as connection:
            jobs.cancel(connection, job)
        return job

    def _item(self) -> str:
        item = {"action": "UPSERT", "resource": "entity", "payload": person("queued", self["mark"])}
        return str(_success(self._caller.post(f"{self.path}/queue", item | {"to": self["tenant"]})).json()["id"])

    def _popped_item(self) -> str:
        item = self._item()
        while (taken := _success(self._caller.post(f"{self.path}/queue/pop", {})).json())["id"] != item:
            pass
        self["item_token"] = taken["token"]
        return item

    def _item_token(self) -> str:
        self["popped_item"] = self._popped_item()
        return self["item_token"]

    def _dead_item(self) -> str:
        item = self._item()
        with self._prepared.api.services.database.write() as connection:
            connection.execute(update(queue).where(queue.c.id == item).values(state="dead"))
        return item

    def _tag(self) -> str:
        _success(self._caller.put(f"{self.path}/tag?key={(key := self._tag_key())}", {"value": self["mark"]}))
        return key

    def _tag_key(self) -> str:
        return f"{self['mark']}/{next(self._prepared.numbers)}"

    def _lock(self) -> str:
        name = self._lock_name()
        response = _success(self._caller.put(f"{self.path}/locks/{name}", {"ttl": 60, "holder": self["mark"]}))
        self["lock_token"] = response.json()["token"]
        return name

    def _lock_token(self) -> str:
        self["lock"] = self._lock()
        return self["lock_token"]

    def _lock_name(self) -> str:
        return f"lock-{self['mark']}-{next(self._prepared.numbers)}"

    def _lock_id(self) -> str:
        name = self._lock()
        response = _success(self._prepared.api.admin.get("/v1/admin/locks?limit=1000")).json()["results"]
        return str(next(lock["id"] for lock in response if lock["name"] == name))

    def _webhook_tenant(self) -> str:
        """Create a tenant with a webhook."""
        name = self._disposable_tenant()
        _success(self._prepared.api.admin.put(f"/v1/admin/tenants/{name}/webhooks", WEBHOOK))
        return name

    def _delta(self) -> str:
        response = self._caller.get(f"{self.path}/exports/delta.json")
        return str(next(iter(_success(response).json()["versions"])))

    def _key(self) -> str:
        return str(
            _success(self._prepared.api.admin.post(f"/v1/admin/tenants/{self['disposable_tenant']}/keys", {})).json()[
                "id"
            ]
        )

    def _grant(self) -> str:
        pattern = {"dataset": f"x{next(self._prepared.numbers)}", "level": "read"}
        return str(
            _success(
                self._prepared.api.admin.post(f"/v1/admin/tenants/{self['disposable_tenant']}/grants", pattern)
            ).json()["id"]
        )

    def _disposable_tenant(self) -> str:
        """Create a tenant that may be changed and deleted."""
        name = f"disposable_tenant{next(self._prepared.numbers)}"
        _success(self._prepared.api.admin.post("/v1/admin/tenants", {"name": name}))
        return name

    def _etag(self) -> str:
        return _success(self._caller.get(self.path)).headers["ETag"]

    def _entity_cursor(self) -> str:
        return str(_success(self._caller.get(f"{self.path}/entities?limit=1")).json()["next"])

    def _sources(self) -> str:
        return (self._prepared.folder / "sources").as_uri()

    def _lake(self) -> str:
        return (self._prepared.folder / "lake" / self["dataset"]).as_uri()

    def _new_name(self) -> str:
        return f"{self['dataset']}_{next(self._prepared.numbers)}"

    def _disposable_dataset(self) -> str:
        """Create a dataset with the same prefix, which may be deleted."""
        self._prepared.api.dataset(name := self._new_name())
        return name


class PreparedLake:
    """The API in this process with a prepared lake, and a caller for every role."""

    def __init__(self, api: InProcessApi, kernels: DirectKernels, folder: Path) -> None:
        self.api = api
        self.folder = folder
        self.numbers = count(1)
        self.statements: dict[str, str] = {}
        """By dataset, the id of a statement, which stays valid in requests after its deletion."""
        self._kernels = kernels
        expired = {"expires": datetime(2020, 1, 1, tzinfo=UTC).isoformat(), "label": MARK}
        self.owner = api.tenant("owner", **{"owned*": "admin", "shared*": "admin"})
        self.callers = {
            "no key": api.anonymous,
            "bad key": api.with_key(f"{str(self.owner.key)[:-4]}0000"),
            "expired key": api.with_key(
                _success(api.admin.post("/v1/admin/tenants/owner/keys", expired)).json()["key"]
            ),
            "unrelated": api.tenant("unrelated", **{"unrelated*": "admin"}),
            **{role: api.tenant(role, **{"shared*": level}) for role, level in LEVELS.items()},
            "administrator": api.admin,
        }
        for name in (SHARED, UNRELATED, OWNED):
            self._prepare(name)
        self.owner_resources = Resources(self, self.owner, "owner", OWNED)
        for name in ALL_RESOURCES:
            assert self.owner_resources[name]

    def resources(self, role: str, dataset: str) -> Resources:
        """Return new resources for a caller; those of no tenant, and those that it may not create, are the owner's."""
        if dataset == UNRELATED:
            return Resources(self, self.callers["unrelated"], "unrelated", UNRELATED)
        shared = Resources(self, self.owner, "owner", dataset)
        tenant = {"administrator": "admin", "no key": "owner"}.get(role, role)
        return Resources(self, self.callers[role], tenant, dataset, shared)

    def dataset(self, name: str) -> Dataset:
        with self.api.services.database.read() as connection:
            dataset = find(connection, DatasetName(name))
        assert dataset is not None
        return dataset

    def job(self, tenant: str, dataset: str) -> str:
        """Enqueue a job of a tenant in the database, as a reader may not request one."""
        with self.api.services.database.write() as connection:
            return jobs.enqueue(
                connection, Operation.FLUSH, self.dataset(dataset).id, TenantName(tenant), f"request-{_mark(dataset)}"
            ).id

    def delete_idempotency_keys(self) -> None:
        """Delete the idempotency keys of all tenants except the owner."""
        with self.api.services.database.write() as connection:
            connection.execute(delete(idempotency).where(idempotency.c.tenant != "owner"))

    def put_bytes(self, caller: Caller, path: str, body: bytes) -> Response:
        return caller("PUT", path, headers={"Content-Type": "application/octet-stream"}, content=body)

    def state(self) -> dict[str, Any]:
        """Return the content of the lake: its files, and all tables except those about requests."""
        with self.api.services.database.read() as connection:
            tables = {
                table.name: sorted(map(repr, connection.execute(select(table))))
                for table in metadata.sorted_tables
                if table.name not in REQUEST_TABLES
            }
        return {**tables, "storage": _file_stats(self.folder / "lake")}

    def owner_state(self) -> dict[str, Any]:
        """Return the part of the content that belongs to the owner or to its dataset."""
        state: dict[str, Any] = {"storage": _file_stats(self.folder / "lake" / OWNED)}
        with self.api.services.database.read() as connection:
            owned = connection.execute(select(dataset_table.c.id).where(dataset_table.c.name == OWNED)).scalar_one()
            batches = select(journal_batches.c.id).where(journal_batches.c.dataset_id == owned)
            for table in metadata.sorted_tables:
                owner_conditions = {
                    "dataset_id": lambda column: column == owned,
                    "tenant": lambda column: column == "owner",
                    "batch": lambda column: column.in_(batches),
                }
                conditions = [test(table.c[name]) for name, test in owner_conditions.items() if name in table.c]
                if table.name in REQUEST_TABLES or not conditions:
                    continue
                rows = connection.execute(select(table).where(conditions[0]))
                state[table.name] = sorted(map(repr, rows))
        return state

    def _prepare(self, name: str) -> None:
        """Create a dataset with a snapshot, a reference between entities, exports, and an unflushed write."""
        mark, caller = _mark(name), self.api.admin
        self.api.dataset(name, title=f"title {mark}", summary=f"summary {mark}")
        write = f"/v1/datasets/{name}/entities?origin=crawl-{mark}"
        owns = {"id": f"owns-{mark}", "schema": "Ownership", "properties": {"owner": [f"ada-{mark}"], "asset": ["b"]}}
        people = [person(entity, mark) for entity in (f"ada-{mark}", f"bob-{mark}")]
        once = {"Idempotency-Key": f"key-{name}"}
        _success((self.owner if name == OWNED else caller).post(write, [*people, owns], headers=once))
        exports_of(self.api, self._kernels).export(self.dataset(name), EXPORT_OPTIONS, ignore)
        _success(caller.post(write, person(f"cem-{mark}", mark)))
        response = caller.get(f"/v1/datasets/{name}/statements?id=cem-{mark}&prop=name")
        self.statements[name] = _success(response).json()["results"][0]["id"]


EXPORT_OPTIONS = ExportOptions(kinds=[ExportKind.ENTITIES, ExportKind.DELTA])

ENTITY_MAPPING = {"schema": "Person", "key": "id", "properties": {"name": {"column": "name"}}}

WEBHOOK = {"url": "https://example.org/hook", "secret": "of at least sixteen letters"}

TENANT_RESOURCES = (
    "stage",
    "filled_stage",
    "upload",
    "filled_upload",
    "job",
    "cancelled_job",
    "item",
    "popped_item",
    "dead_item",
)
"""Resources of a tenant that no other tenant finds, whatever its level on the dataset."""

TENANT_NAMESPACES = ("tag", "lock", "item_token", "lock_token")
"""Resources of which every tenant has its own namespace, and the tokens of their holders."""

ALL_RESOURCES = (
    *TENANT_RESOURCES,
    *TENANT_NAMESPACES,
    *(
        "entity",
        "origin",
        "statement",
        "text_origin",
        "checksum",
        "file",
        "file_path",
        "content_hash",
        "mapping_version",
    ),
    *("version", "snapshot", "ref", "delta", "etag", "entity_cursor", "sources", "lake", "disposable_dataset"),
)
"""All resources that have an id or a name."""


def person(name: str, text: str) -> dict[str, Any]:
    return {"id": name, "schema": "Person", "properties": {"name": [f"Ada {text}"]}}


@contextmanager
def prepare_lake(folder: Path, database_url: str, pool: ProcessPoolExecutor) -> Iterator[PreparedLake]:
    """Prepare a lake in a folder, with a migrated and empty database."""
    (folder / "sources").mkdir()
    (folder / "sources" / "file.txt").write_text("from elsewhere")
    settings = load_settings(
        database_url=database_url,
        lake_uri=str(folder / "lake"),
        admin_key_file=folder / "admin.key",
        fetch_roots=str(folder / "sources"),
        event_max_seconds=0.2,
    )
    database, store = Database(settings.database_url), Store(Connection.from_settings(settings))
    open_lake(store)
    key = ensure_admin(database, settings)
    assert key is not None
    with InProcessApi(build_services(settings, database, store), key) as api:
        yield PreparedLake(api, DirectKernels(settings, pool), folder)
    database.close()


def _mark(dataset: str) -> str:
    return MARK if MARK in dataset else "plain"


def _success(response: Response) -> Response:
    assert response.status_code < 300, (response.request.url, response.status_code, response.text)
    return response


def _file_stats(folder: Path) -> list[tuple[str, int, int]]:
    """Return every file below a folder, with its size and modification time."""
    paths = (os.path.join(directory, name) for directory, _, names in os.walk(folder) for name in names)
    return sorted((path, (stat := os.stat(path)).st_size, stat.st_mtime_ns) for path in paths)
