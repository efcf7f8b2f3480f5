"""A lake in which everything has an id, and in which everything of one tenant bears a mark that nobody else may see."""

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
from tarn.model.export import Kind
from tarn.model.job import ExportOptions, Operation
from tarn.model.names import DatasetName, TenantName
from tarn.settings import load_settings
from tarn.storage.connection import Connection
from tarn.storage.lake_root import open_lake
from tarn.storage.store import Store

from tests.in_process_api import Caller, InProcessApi
from tests.pipeline.kernels import DirectKernels
from tests.pipeline.test_export import exports_of
from tests.pipeline.test_rewrite import ignore

MARK = "qzcanaryqz"
"""In every word that the tenant `owner` says; a dataset name may have it, and a header."""

HELD, MINE, THEIRS = "held", "mine", f"theirs_{MARK}"
"""The dataset on which every role holds its level, the stranger's own, and the one that only its owner may see."""

LEVELS = {"reader": "read", "writer": "write", "maintainer": "maintain", "keeper": "admin"}
"""Roles: a tenant each, with this level on `held` and everything that begins so."""

REQUEST_TABLES = {"access_revision", "audit", "idempotency", "readers", "workers"}
"""Tables that tell of requests and processes; what a refused request may add to."""


class Resources(dict[str, str]):
    """Ids of one tenant in one dataset by what they are called in paths, each made when it is first asked for."""

    def __init__(
        self, world: "PreparedLake", caller: Caller, tenant: str, dataset: str, shared: "Resources | None" = None
    ) -> None:
        super().__init__(dataset=dataset, tenant=tenant, slug="internal", value="Eve", mark=_mark(dataset))
        self._world = world
        self._caller = caller
        self._shared = shared

    @property
    def path(self) -> str:
        return f"/v1/datasets/{self['dataset']}"

    def __missing__(self, name: str) -> str:
        make = getattr(self, f"_{name}")
        is_own = self._shared is None or name in OWN or name in TENANT_NAMESPACES
        self[name] = make() if is_own or self._shared is None else self._shared[name]
        return self[name]

    def _entity(self) -> str:
        return f"ada-{self['mark']}"

    def _text_origin(self) -> str:
        return f"ocr-{self['mark']}"

    def _origin(self) -> str:
        return f"crawl-{self['mark']}"

    def _statement(self) -> str:
        return self._world.statements[self["dataset"]]

    def _file_path(self) -> str:
        return f"papers/{self['mark']}-{next(self._world.numbers)}.csv"

    def _checksum(self) -> str:
        body = f"id,name\n{self['mark']},{next(self._world.numbers)}\n".encode()
        made = _success(self._world.put_bytes(self._caller, f"{self.path}/files?path={self['file_path']}", body)).json()
        self["file"] = made["id"]
        text = f"{self.path}/files/{made['checksum']}/text/{self['text_origin']}"
        _success(self._world.put_bytes(self._caller, text, f"text {self['mark']}".encode()))
        return str(made["checksum"])

    def _file(self) -> str:
        self["checksum"] = self._checksum()
        return self["file"]

    def _content_hash(self) -> str:
        for title in ("first", "second"):
            entities = {f"{title}_{self['mark']}": ENTITY_MAPPING}
            _success(self._caller.put(f"{self.path}/mappings/{self['checksum']}", {"entities": entities}))
        return self["checksum"]

    def _mapping_version(self) -> str:
        found = _success(self._caller.get(f"{self.path}/mappings/{self['content_hash']}/versions"))
        return str(found.json()["results"][0]["timestamp"])

    def _version(self) -> str:
        _success(self._caller.patch(self.path, {"title": f"title {next(self._world.numbers)} {self['mark']}"}))
        found = _success(self._caller.get(f"{self.path}/versions")).json()["results"]
        return str(next(version["timestamp"] for version in found if version["name"] == "config.yml"))

    def _stage(self) -> str:
        made = self._caller.post(f"{self.path}/stages", {"origin": self["origin"], "message": self["mark"]})
        return str(_success(made).json()["id"])

    def _filled_stage(self) -> str:
        stage = self._stage()
        _success(self._caller.post(f"{self.path}/stages/{stage}/entities", person("staged", self["mark"])))
        return stage

    def _upload(self) -> str:
        made = _success(self._caller.post(f"{self.path}/uploads", {"length": 4, "path": self._file_path()})).json()
        return str(made["id"])

    def _filled_upload(self) -> str:
        upload = self._upload()
        _success(self._world.put_bytes(self._caller, f"{self.path}/uploads/{upload}?offset=0", b"abcd"))
        return upload

    def _snapshot(self) -> str:
        return str(_success(self._caller.get(f"{self.path}/snapshots/latest")).json()["id"])

    def _ref(self) -> str:
        name = f"ref-{self['mark']}-{next(self._world.numbers)}"
        _success(self._caller.put(f"{self.path}/refs/{name}", {"snapshot": self["snapshot"]}))
        return name

    def _job(self) -> str:
        return self._world.job(self["tenant"], self["dataset"])

    def _over_job(self) -> str:
        job = self._job()
        with self._world.house.services.database.write() as connection:
            jobs.cancel(connection, job)
        return job

    def _item(self) -> str:
        item = {"action": "UPSERT", "resource": "entity", "payload": person("queued", self["mark"])}
        return str(_success(self._caller.post(f"{self.path}/queue", item | {"to": self["tenant"]})).json()["id"])

    def _taken_item(self) -> str:
        item = self._item()
        while (taken := _success(self._caller.post(f"{self.path}/queue/pop", {})).json())["id"] != item:
            pass
        self["item_token"] = taken["token"]
        return item

    def _item_token(self) -> str:
        self["taken_item"] = self._taken_item()
        return self["item_token"]

    def _dead_item(self) -> str:
        item = self._item()
        with self._world.house.services.database.write() as connection:
            connection.execute(update(queue).where(queue.c.id == item).values(state="dead"))
        return item

    def _tag(self) -> str:
        _success(self._caller.put(f"{self.path}/tag?key={(key := self._tag_key())}", {"value": self["mark"]}))
        return key

    def _tag_key(self) -> str:
        return f"{self['mark']}/{next(self._world.numbers)}"

    def _lock(self) -> str:
        name = self._lock_name()
        made = _success(self._caller.put(f"{self.path}/locks/{name}", {"ttl": 60, "holder": self["mark"]}))
        self["lock_token"] = made.json()["token"]
        return name

    def _lock_token(self) -> str:
        self["lock"] = self._lock()
        return self["lock_token"]

    def _lock_name(self) -> str:
        return f"lock-{self['mark']}-{next(self._world.numbers)}"

    def _lock_id(self) -> str:
        name = self._lock()
        found = _success(self._world.house.admin.get("/v1/admin/locks?limit=1000")).json()["results"]
        return str(next(lock["id"] for lock in found if lock["name"] == name))

    def _hooked(self) -> str:
        """A tenant with a webhook."""
        name = self._victim()
        _success(self._world.house.admin.put(f"/v1/admin/tenants/{name}/webhooks", WEBHOOK))
        return name

    def _delta(self) -> str:
        found = self._caller.get(f"{self.path}/exports/delta.json")
        return str(next(iter(_success(found).json()["versions"])))

    def _key(self) -> str:
        return str(_success(self._world.house.admin.post(f"/v1/admin/tenants/{self['victim']}/keys", {})).json()["id"])

    def _grant(self) -> str:
        pattern = {"dataset": f"x{next(self._world.numbers)}", "level": "read"}
        return str(
            _success(self._world.house.admin.post(f"/v1/admin/tenants/{self['victim']}/grants", pattern)).json()["id"]
        )

    def _victim(self) -> str:
        """A tenant that may be changed and deleted."""
        name = f"victim{next(self._world.numbers)}"
        _success(self._world.house.admin.post("/v1/admin/tenants", {"name": name}))
        return name

    def _etag(self) -> str:
        return _success(self._caller.get(self.path)).headers["ETag"]

    def _entity_cursor(self) -> str:
        return str(_success(self._caller.get(f"{self.path}/entities?limit=1")).json()["next"])

    def _sources(self) -> str:
        return (self._world.folder / "sources").as_uri()

    def _lake(self) -> str:
        return (self._world.folder / "lake" / self["dataset"]).as_uri()

    def _fresh_name(self) -> str:
        return f"{self['dataset']}_{next(self._world.numbers)}"

    def _spare(self) -> str:
        """A dataset of the same family, which may be deleted."""
        self._world.house.dataset(name := self._fresh_name())
        return name


class PreparedLake:
    """The API in this process around a prepared lake, and everybody who may call it."""

    def __init__(self, house: InProcessApi, kernels: DirectKernels, folder: Path) -> None:
        self.house = house
        self.folder = folder
        self.numbers = count(1)
        self.statements: dict[str, str] = {}
        """By dataset, one that stays known though it is deleted."""
        self._kernels = kernels
        expired = {"expires": datetime(2020, 1, 1, tzinfo=UTC).isoformat(), "label": MARK}
        self.owner = house.tenant("owner", **{"theirs*": "admin", "held*": "admin"})
        self.callers = {
            "no key": house.nobody,
            "bad key": house.with_key(f"{str(self.owner.key)[:-4]}0000"),
            "expired key": house.with_key(
                _success(house.admin.post("/v1/admin/tenants/owner/keys", expired)).json()["key"]
            ),
            "stranger": house.tenant("stranger", **{"mine*": "admin"}),
            **{role: house.tenant(role, **{"held*": level}) for role, level in LEVELS.items()},
            "administrator": house.admin,
        }
        for name in (HELD, MINE, THEIRS):
            self._prepare(name)
        self.theirs = Resources(self, self.owner, "owner", THEIRS)
        for thing in EVERYTHING:
            assert self.theirs[thing]

    def things(self, role: str, dataset: str) -> Resources:
        """Fresh things for a caller; what belongs to no tenant, or a caller may not make, is the owner's."""
        if dataset == MINE:
            return Resources(self, self.callers["stranger"], "stranger", MINE)
        shared = Resources(self, self.owner, "owner", dataset)
        tenant = {"administrator": "admin", "no key": "owner"}.get(role, role)
        return Resources(self, self.callers[role], tenant, dataset, shared)

    def dataset(self, name: str) -> Dataset:
        with self.house.services.database.read() as connection:
            found = find(connection, DatasetName(name))
        assert found is not None
        return found

    def job(self, tenant: str, dataset: str) -> str:
        """A job of a tenant that waits; in the process's own words, as a reader cannot ask for one."""
        with self.house.services.database.write() as connection:
            return jobs.enqueue(
                connection, Operation.FLUSH, self.dataset(dataset).id, TenantName(tenant), f"request-{_mark(dataset)}"
            ).id

    def forget_answers(self) -> None:
        """Idempotency keys are used by nobody but the owner."""
        with self.house.services.database.write() as connection:
            connection.execute(delete(idempotency).where(idempotency.c.tenant != "owner"))

    def put_bytes(self, caller: Caller, path: str, body: bytes) -> Response:
        return caller("PUT", path, headers={"Content-Type": "application/octet-stream"}, content=body)

    def state(self) -> dict[str, Any]:
        """Everything that the lake consists of, but for what tells of requests."""
        with self.house.services.database.read() as connection:
            tables = {
                table.name: sorted(map(repr, connection.execute(select(table))))
                for table in metadata.sorted_tables
                if table.name not in REQUEST_TABLES
            }
        return {**tables, "storage": _file_stats(self.folder / "lake")}

    def state_of_theirs(self) -> dict[str, Any]:
        """The same, but only what belongs to the owner or to its dataset."""
        found: dict[str, Any] = {"storage": _file_stats(self.folder / "lake" / THEIRS)}
        with self.house.services.database.read() as connection:
            theirs = connection.execute(select(dataset_table.c.id).where(dataset_table.c.name == THEIRS)).scalar_one()
            batches = select(journal_batches.c.id).where(journal_batches.c.dataset_id == theirs)
            for table in metadata.sorted_tables:
                belongs = {
                    "dataset_id": lambda column: column == theirs,
                    "tenant": lambda column: column == "owner",
                    "batch": lambda column: column.in_(batches),
                }
                conditions = [test(table.c[name]) for name, test in belongs.items() if name in table.c]
                if table.name in REQUEST_TABLES or not conditions:
                    continue
                rows = connection.execute(select(table).where(conditions[0]))
                found[table.name] = sorted(map(repr, rows))
        return found

    def _prepare(self, name: str) -> None:
        """A dataset with a snapshot, a reference between entities, exports, and a write that waits."""
        mark, caller = _mark(name), self.house.admin
        self.house.dataset(name, title=f"title {mark}", summary=f"summary {mark}")
        write = f"/v1/datasets/{name}/entities?origin=crawl-{mark}"
        owns = {"id": f"owns-{mark}", "schema": "Ownership", "properties": {"owner": [f"ada-{mark}"], "asset": ["b"]}}
        people = [person(one, mark) for one in (f"ada-{mark}", f"bob-{mark}")]
        once = {"Idempotency-Key": f"key-{name}"}
        _success((self.owner if name == THEIRS else caller).post(write, [*people, owns], headers=once))
        exports_of(self.house, self._kernels).export(self.dataset(name), EXPORTED, ignore)
        _success(caller.post(write, person(f"cem-{mark}", mark)))
        found = caller.get(f"/v1/datasets/{name}/statements?id=cem-{mark}&prop=name")
        self.statements[name] = _success(found).json()["results"][0]["id"]


EXPORTED = ExportOptions(kinds=[Kind.ENTITIES, Kind.DELTA])

ENTITY_MAPPING = {"schema": "Person", "key": "id", "properties": {"name": {"column": "name"}}}

WEBHOOK = {"url": "https://example.org/hook", "secret": "of at least sixteen letters"}

OWN = ("stage", "filled_stage", "upload", "filled_upload", "job", "over_job", "item", "taken_item", "dead_item")
"""What belongs to a tenant: no other one finds it, whatever it may do on the dataset."""

TENANT_NAMESPACES = ("tag", "lock", "item_token", "lock_token")
"""What every tenant has under names of its own, with what shows that it holds it."""

EVERYTHING = (
    *OWN,
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
    *("version", "snapshot", "ref", "delta", "etag", "entity_cursor", "sources", "lake", "spare"),
)
"""What a dataset has that has an id or a name."""


def person(name: str, text: str) -> dict[str, Any]:
    return {"id": name, "schema": "Person", "properties": {"name": [f"Ada {text}"]}}


@contextmanager
def built(folder: Path, database_url: str, pool: ProcessPoolExecutor) -> Iterator[PreparedLake]:
    """A world with its lake in a folder, and a database that is migrated and empty."""
    (folder / "sources").mkdir()
    (folder / "sources" / "file.txt").write_text("from elsewhere")
    settings = load_settings(
        database_url=database_url,
        lake_uri=str(folder / "lake"),
        admin_key_file=folder / "admin.key",
        fetch_roots=str(folder / "sources"),
        event_longest=0.2,
    )
    database, store = Database(settings.database_url), Store(Connection.from_settings(settings))
    open_lake(store)
    key = ensure_admin(database, settings)
    assert key is not None
    with InProcessApi(build_services(settings, database, store), key) as house:
        yield PreparedLake(house, DirectKernels(settings, pool), folder)
    database.close()


def _mark(dataset: str) -> str:
    return MARK if MARK in dataset else "plain"


def _success(answer: Response) -> Response:
    assert answer.status_code < 300, (answer.request.url, answer.status_code, answer.text)
    return answer


def _file_stats(folder: Path) -> list[tuple[str, int, int]]:
    """Every file below a folder, with what changes when it is written."""
    paths = (os.path.join(directory, name) for directory, _, names in os.walk(folder) for name in names)
    return sorted((path, (found := os.stat(path)).st_size, found.st_mtime_ns) for path in paths)
