"""Crawls: every file below a location is archived once, despite failures."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select
from tarn.archive.fetching.fetch import Fetcher
from tarn.archive.fetching.sources import Source
from tarn.db.tables import file_puts, journal_batches
from tarn.pipeline.tasks import crawl_files
from tarn.pipeline.tasks.crawl_files import fetch_files
from tarn.pipeline.tasks.crawl_tasks import FetchedFiles, FetchFiles
from tarn.pipeline.tasks.task import Task
from tarn.settings import Settings, load_settings
from tarn.storage.store import Store
from tarn.worker.flusher import SparkFlusher
from tarn.worker.loop import Worker

from tests.archive.web import answer, page, scripted
from tests.faults.scene import Killed, kill_at
from tests.in_process_api import ONE_DATABASE, InProcessApi
from tests.pipeline.kernels import DirectKernels
from tests.s3 import BUCKET, S3Server
from tests.worker.workers import expire_heartbeats, make_worker

FILES = {"a.txt": b"first", "b/c.pdf": b"%PDF-1.4 \xff", "b/d/e.csv": b"x,y\n1,2\n", "b/d/f.txt": b"first"}
DOCUMENTS = {"Folder": 2, "PlainText": 2, "Pages": 1, "Table": 1}
FILES_URL = "/v1/datasets/test/files"


@pytest.fixture
def drop(tmp_path: Path) -> Path:
    """Return a folder from which crawls may fetch."""
    folder = tmp_path / "drop"
    folder.mkdir()
    return folder


@pytest.fixture
def settings(database_url: str, tmp_path: Path, drop: Path, s3: S3Server) -> Settings:
    return load_settings(
        database_url=database_url,
        lake_uri=str(tmp_path / "lake"),
        admin_key_file=tmp_path / "admin.key",
        fetch_roots=(drop,),
        fetch_private_hosts=("127.0.0.1",),
        fetch_stores={f"s3://{BUCKET}/crawled": s3.options},
        fetch_max_bytes=3 << 20,
    )


@pytest.fixture
def crawler(api: InProcessApi, kernels: DirectKernels, dataset: Any) -> "Crawler":
    return Crawler(api, kernels)


@dataclass(frozen=True)
class Crawler:
    """Requests crawls of one dataset, runs them with a worker, and reads the results."""

    api: InProcessApi
    kernels: Any

    @property
    def worker(self) -> Worker:
        services = self.api.services
        flusher = SparkFlusher(
            services.settings, services.database, services.store, "tester", kernels=lambda: self.kernels
        )
        return make_worker(self.api, flusher, flusher.maintenance())

    def request(self, uri: str | Path, **options: Any) -> str:
        response = self.api.admin.post("/v1/datasets/test/operations/crawl", {"uri": str(uri), **options})
        assert response.status_code == 202, response.text
        return str(response.headers["Location"])

    def __call__(self, uri: str | Path, **options: Any) -> dict[str, Any]:
        """Run a crawl that must succeed, and return its result."""
        location = self.request(uri, **options)
        assert self.worker.step()
        return self.result(location)

    def result(self, location: str) -> dict[str, Any]:
        job = self.api.admin.get(location).json()
        assert job["state"] == "done", job
        result: dict[str, Any] = job["result"]
        return result

    def files(self) -> list[dict[str, Any]]:
        files: list[dict[str, Any]] = self.api.admin.get(f"{FILES_URL}?limit=1000").json()["results"]
        return files

    def contents(self) -> dict[str, bytes]:
        return {file["path"]: self._data(file) for file in self.files()}

    def entities(self) -> list[dict[str, Any]]:
        response = self.api.admin.get("/v1/datasets/test/entities?limit=1000")
        entities: list[dict[str, Any]] = response.json()["results"]
        return entities

    def schemata(self) -> dict[str, int]:
        return Counter(entity["schema"] for entity in self.entities())

    def tag(self, key: str) -> str | None:
        tags: dict[str, str] = self.api.admin.get("/v1/datasets/test/freshness").json()["tags"]
        return tags.get(key)

    def _data(self, file: dict[str, Any]) -> bytes:
        return self.api.admin.get(f"{FILES_URL}/{file['checksum']}/data").content


@dataclass(frozen=True)
class InProcessKernels:
    """Runs the tasks of crawls in this process, with optional changes of tasks and steps."""

    store: Store
    cores: int = 1
    reached: Callable[[str], None] = lambda _: None
    changed: Callable[[FetchFiles], FetchFiles] = lambda task: task

    def run(self, partitions: list[list[Task[FetchedFiles]]]) -> Iterator[tuple[int, FetchedFiles]]:
        for task in (task for partition in partitions for task in partition):
            assert isinstance(task, FetchFiles)
            yield task.number, fetch_files(self.changed(task), self.store, reached=self.reached)


def fill(folder: Path, files: dict[str, bytes]) -> None:
    for path, content in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)


def count(result: dict[str, Any]) -> tuple[int, int, int]:
    return result["files"], result["skipped"], result["failed"]


def test_folder_is_crawled_with_documents_and_folders(crawler: Crawler, drop: Path):
    fill(drop, FILES)

    result = crawler(drop)

    size = sum(map(len, FILES.values()))
    counts = {"files": 4, "size": size, "skipped": 0, "failed": 0}
    omitted = {"count": 0, "by_property": {}, "first": []}
    assert result == {"operation": "crawl", **counts, "first_failures": [], "omitted": omitted}
    assert crawler.contents() == FILES
    assert crawler.schemata() == DOCUMENTS
    assert {entity["origin"][0] for entity in crawler.entities()} == {"crawl"}
    assert {file["id"] for file in crawler.files()} < {entity["id"] for entity in crawler.entities()}


@ONE_DATABASE
def test_crawl_reports_values_that_its_documents_and_folders_lack(crawler: Crawler, drop: Path):
    fill(drop, {"\u200b/a.txt": b"x", "\u200b/\u200b": b"y", "c.bin": b"\x00\x01"})

    result = crawler(drop)

    reason = "rejected by FollowTheMoney's cleaning, of the file \u200b/"
    assert result["files"] == 3
    assert result["omitted"]["count"] == 2
    assert result["omitted"]["by_property"] == {"Folder:fileName": 1, "PlainText:fileName": 1}
    assert [(value["line"], value["value"]) for value in result["omitted"]["first"]] == [(None, "\u200b")] * 2
    assert all(value["reason"].startswith(reason) for value in result["omitted"]["first"])


@ONE_DATABASE
def test_finished_crawl_writes_tags_and_a_run_record(crawler: Crawler, drop: Path, tmp_path: Path):
    fill(drop, FILES)
    assert crawler.tag("operations/crawl/last_run") is None

    location = crawler.request(drop)
    crawler.worker.step()

    last_run = crawler.tag("operations/crawl/last_run")
    job = crawler.api.admin.get(location).json()
    assert last_run is not None
    assert job["started"] <= last_run <= str(crawler.tag("archive/last_updated")) <= job["finished"]
    assert job["progress"] == {"done": 4, "total": 4, "unit": "files"}
    tag_file = tmp_path / "lake/test/tags/lakehouse/operations/crawl/last_run"
    assert tag_file.read_text().startswith(last_run[:19])
    (run,) = (tmp_path / "lake/test/jobs/runs/crawl").iterdir()
    assert json.loads(run.read_bytes())["result"]["files"] == 4


@ONE_DATABASE
def test_known_path_is_skipped_without_reading_although_it_changed(crawler: Crawler, drop: Path):
    fill(drop, FILES)
    crawler(drop)
    fill(drop, {"a.txt": b"other", "new.txt": b"new"})

    assert count(crawler(drop)) == (1, 4, 0)
    assert crawler.contents() == FILES | {"new.txt": b"new"}


@ONE_DATABASE
def test_known_content_is_skipped_at_any_path(crawler: Crawler, drop: Path):
    fill(drop, FILES)

    assert count(crawler(drop, existing="skip_checksum")) == (3, 1, 0)
    fill(drop, {"a.txt": b"other", "moved/c.pdf": FILES["b/c.pdf"]})

    assert count(crawler(drop, existing="skip_checksum")) == (1, 4, 0)
    assert [file["path"] for file in crawler.files()] == ["a.txt", "a.txt", "b/c.pdf", "b/d/e.csv"]


@ONE_DATABASE
def test_overwrite_fetches_everything_again(crawler: Crawler, drop: Path):
    fill(drop, FILES)
    crawler(drop)
    fill(drop, {"a.txt": b"other"})

    assert count(crawler(drop, existing="overwrite", origin="again")) == (4, 0, 0)
    assert sorted(file["origin"] for file in crawler.files()) == ["again"] * 4 + ["crawl"]


@ONE_DATABASE
@pytest.mark.parametrize(
    ("options", "paths"),
    [
        ({"glob": ["*.txt"]}, ["a.txt", "b/d/f.txt"]),
        ({"glob": ["*.pdf", "b/*.csv"]}, ["b/c.pdf", "b/d/e.csv"]),
        ({"exclude": ["b/d/*"]}, ["a.txt", "b/c.pdf"]),
        ({"prefix": "b/d/"}, ["b/d/e.csv", "b/d/f.txt"]),
        ({"prefix": "b/", "glob": ["*.txt", "*.pdf"], "exclude": ["*c*"]}, ["b/d/f.txt"]),
        ({"glob": ["nothing"]}, []),
    ],
)
def test_filters_select_the_fetched_files(crawler: Crawler, drop: Path, options: dict[str, Any], paths: list[str]):
    fill(drop, FILES)

    assert count(crawler(drop, **options)) == (len(paths), 0, 0)
    assert [file["path"] for file in crawler.files()] == paths


@ONE_DATABASE
def test_unfetchable_files_are_reported_and_the_rest_is_fetched(crawler: Crawler, drop: Path, tmp_path: Path):
    fill(drop, FILES | {"empty.txt": b"", "large.bin": bytes((3 << 20) + 1), "back\\slash.txt": b"x"})
    (tmp_path / "secret").write_text("secret")
    (drop / "out.txt").symlink_to(tmp_path / "secret")
    (drop / "up.txt").symlink_to("../secret")
    (drop / "round").symlink_to("round")
    (drop / "etc").symlink_to("/etc")
    (drop / "within.txt").symlink_to("a.txt")
    os.mkfifo(drop / "pipe")
    (drop / os.fsdecode(b"\xff.txt")).write_text("x")

    result = crawler(drop)

    missed = {failure["path"]: failure["reason"] for failure in result["first_failures"]}
    assert count(result) == (6, 0, 8)
    assert missed.keys() == {
        "large.bin",
        "back\\slash.txt",
        "out.txt",
        "up.txt",
        "round",
        "etc",
        "pipe",
        "\ufffd.txt",
    }
    assert "leads out of" in missed["out.txt"] + missed["up.txt"]
    assert "no regular file" in missed["pipe"]
    assert crawler.contents() == FILES | {"within.txt": b"first", "empty.txt": b""}


@ONE_DATABASE
def test_first_hundred_failures_are_listed(crawler: Crawler, drop: Path):
    fill(drop, {f"{number:03d}\\": b"x" for number in range(120)} | {"z": b"z"})

    result = crawler(drop)

    assert count(result) == (1, 0, 120)
    assert [failure["path"] for failure in result["first_failures"]] == [f"{number:03d}\\" for number in range(100)]


@ONE_DATABASE
def test_file_that_changes_while_it_is_read_is_a_failure_without_trace(
    api: InProcessApi, dataset: Any, drop: Path, store: Store
):
    fill(drop, FILES | {"log.txt": b"line\n"})

    @dataclass(frozen=True)
    class ChangingFetcher:
        inner: Fetcher

        def open(self, uri: str) -> Source:
            source = self.inner.open(uri)
            if uri.endswith("log.txt"):
                with (drop / "log.txt").open("ab") as file:
                    file.write(b"more\n")
            return source

    def with_changing_fetcher(task: FetchFiles) -> FetchFiles:
        return replace(task, fetcher=ChangingFetcher(task.fetcher))  # type: ignore[arg-type]  # only `open` is called

    crawler = Crawler(api, InProcessKernels(store, changed=with_changing_fetcher))
    result = crawler(drop)

    assert count(result) == (4, 0, 1)
    assert result["first_failures"] == [{"path": "log.txt", "reason": "the file changed while it was read"}]
    assert crawler.contents() == FILES


@ONE_DATABASE
@pytest.mark.parametrize("step", ["staged", "announced", "placed", "written", "recorded"])
def test_killed_crawl_is_completed_by_the_next_with_one_effect(
    api: InProcessApi, dataset: Any, drop: Path, store: Store, monkeypatch: pytest.MonkeyPatch, step: str
):
    monkeypatch.setattr(crawl_files, "TOGETHER", 2)
    fill(drop, FILES | {"z.bin": bytes(2 << 20)})
    reached = Counter[str]()

    def second(name: str) -> None:
        """Die at the second file, when some are stored and others are in progress."""
        reached[name] += 1
        if reached["recorded"] or name == step == "recorded":
            kill_at(step)(name)

    location = Crawler(api, None).request(drop)
    with pytest.raises(Killed):
        Crawler(api, InProcessKernels(store, reached=second)).worker.step()
    contents = Crawler(api, None).contents()
    assert len(contents) == 2
    assert contents.items() <= FILES.items()
    expire_heartbeats(api)

    crawler = Crawler(api, InProcessKernels(store))
    crawler.worker.step()

    assert count(crawler.result(location)) == (3, 2, 0)
    assert crawler.contents() == FILES | {"z.bin": bytes(2 << 20)}
    assert crawler.schemata() == DOCUMENTS | {"Document": 1}
    with api.services.database.read() as connection:
        entities = connection.execute(select(func.sum(journal_batches.c.entities))).scalar_one()
        announced = connection.execute(select(func.count()).select_from(file_puts)).scalar_one()
    # Each attempt writes folders, one attempt each document. A vacuum cleans up after attempts that died.
    assert entities == 8
    assert announced == (0 if step in ("staged", "recorded") else 2)


@ONE_DATABASE
def test_slow_crawl_continues_in_another_round(
    api: InProcessApi, dataset: Any, drop: Path, store: Store, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(crawl_files, "TOGETHER", 1)
    monkeypatch.setattr(crawl_files, "BUDGET", 0.0)
    fill(drop, FILES)

    crawler = Crawler(api, InProcessKernels(store))

    assert count(crawler(drop)) == (4, 0, 0)
    assert crawler.contents() == FILES


@ONE_DATABASE
def test_index_page_is_crawled_and_each_file_is_fetched_once(crawler: Crawler):
    with scripted() as server:
        server.scripts = {
            "/files/": page("a.txt", "b/", "gone.txt", "http://example.org/elsewhere.txt", "/other/x.txt"),
            "/files/b/": page("c.pdf", "../a.txt", "../b/c.pdf"),
            "/files/a.txt": answer(b"first"),
            "/files/b/c.pdf": answer(b"%PDF-1.4 \xff"),
        }
        result = crawler(f"http://127.0.0.1:{server.port}/files/")
        requests = Counter(request.split()[1] for request in server.requests)

    assert count(result) == (2, 0, 1)
    assert result["first_failures"][0]["path"] == "gone.txt"
    assert crawler.contents() == {"a.txt": b"first", "b/c.pdf": b"%PDF-1.4 \xff"}
    assert requests == dict.fromkeys(("/files/", "/files/b/", "/files/a.txt", "/files/b/c.pdf", "/files/gone.txt"), 1)


@ONE_DATABASE
def test_prefix_of_a_store_is_crawled(crawler: Crawler, s3: S3Server):
    for path, content in FILES.items():
        s3.client().put_object(Bucket=BUCKET, Key=f"crawled/in/{path}", Body=content)

    assert count(crawler(f"s3://{BUCKET}/crawled/in", glob=["*.pdf", "*.txt"])) == (3, 0, 0)
    assert crawler.contents() == {path: FILES[path] for path in ("a.txt", "b/c.pdf", "b/d/f.txt")}


@ONE_DATABASE
def test_missing_location_fails_the_job(crawler: Crawler, drop: Path):
    location = crawler.request(drop / "nowhere")
    crawler.worker.step()

    job = crawler.api.admin.get(location).json()
    assert (job["state"], job["problem"]["type"]) == ("failed", "/problems/file-not-found")
    assert crawler.tag("operations/crawl/last_run") is None


@ONE_DATABASE
def test_exhausted_quota_stops_the_crawl(crawler: Crawler, drop: Path):
    fill(drop, FILES)
    crawler.api.admin.put("/v1/admin/tenants/admin/limits", {"quota_bytes": 8})

    location = crawler.request(drop)
    crawler.worker.step()

    job = crawler.api.admin.get(location).json()
    assert (job["state"], job["problem"]["type"]) == ("queued", "/problems/quota-exceeded")
    assert (crawler.files(), crawler.entities()) == ([], [])


@ONE_DATABASE
def test_large_file_over_the_quota_stops_the_crawl_unless_its_content_is_skipped(crawler: Crawler, drop: Path):
    large = bytes(2 << 20)
    fill(drop, {"large.bin": large})
    assert count(crawler(drop)) == (1, 0, 0)
    crawler.api.admin.put("/v1/admin/tenants/admin/limits", {"quota_bytes": len(large)})
    fill(drop, {"again.bin": large})

    assert count(crawler(drop, existing="skip_checksum")) == (0, 2, 0)
    fill(drop, {"other.bin": b"x" + large})
    location = crawler.request(drop, existing="skip_checksum")
    crawler.worker.step()

    job = crawler.api.admin.get(location).json()
    assert (job["state"], job["problem"]["type"]) == ("queued", "/problems/quota-exceeded")
    assert [file["path"] for file in crawler.files()] == ["large.bin"]
    assert crawler.api.admin.get("/v1/admin/tenants/admin/limits").json()["used_bytes"] == len(large)
    assert not list(crawler.api.services.store.list("test/uploads"))


@ONE_DATABASE
def test_crawl_waits_while_the_journal_is_full(crawler: Crawler, drop: Path):
    fill(drop, FILES)
    services = crawler.api.services
    full = replace(services, settings=services.settings.model_copy(update={"journal_max_rows": 1}))
    crawler.api.admin.post("/v1/datasets/test/entities", {"id": "a", "schema": "Person"})

    location = crawler.request(drop)
    with_less = Crawler(InProcessApi(full, str(crawler.api.admin.key)), crawler.kernels)
    with_less.worker.step()

    job = crawler.api.admin.get(location).json()
    assert (job["state"], job["problem"]) == ("queued", None)
    assert job["not_before"] is not None
    assert crawler.files() == []


@ONE_DATABASE
@pytest.mark.parametrize(
    "uri",
    [
        "file:///etc/passwd",
        "/etc",
        "gopher://example.org/",
        "http://user:secret@example.org/",
        f"s3://{BUCKET}/other",
        "relative/path",
        "http://0x7f.1/",
    ],
)
def test_location_that_is_not_allowed_is_refused_immediately(crawler: Crawler, uri: str):
    response = crawler.api.admin.post("/v1/datasets/test/operations/crawl", {"uri": uri})

    assert (response.status_code, response.json()["errors"][0]["field"]) == (422, "uri")
    assert "secret" not in response.text
    assert not crawler.worker.step()


@ONE_DATABASE
def test_crawl_needs_maintain_and_its_job_is_hidden_from_other_tenants(crawler: Crawler, drop: Path):
    path = "/v1/datasets/test/operations/crawl"
    writer = crawler.api.tenant("writer", test="write")
    stranger = crawler.api.tenant("stranger", other="admin")
    keeper = crawler.api.tenant("keeper", test="maintain")

    assert writer.post(path, {"uri": str(drop)}).status_code == 403
    assert stranger.post(path, {"uri": str(drop)}).status_code == 404
    fill(drop, FILES)
    location = keeper.post(path, {"uri": str(drop)}).headers["Location"]
    crawler.worker.step()

    assert keeper.get(location).json()["result"]["files"] == 4
    assert {file["tenant"] for file in crawler.files()} == {"keeper"}
    assert keeper.get("/v1/whoami").json()["limits"]["used_bytes"] == sum(map(len, FILES.values()))
    assert stranger.get(FILES_URL).status_code == 404
    audited = crawler.api.admin.get("/v1/admin/audit?tenant=keeper").json()["results"]
    assert [entry["action"] for entry in audited] == ["crawl_dataset"] * 2


@ONE_DATABASE
def test_ftm_reads_the_documents_of_a_crawl(crawler: Crawler, drop: Path, tmp_path: Path):
    fill(drop, FILES | {"報告/письмо.eml": b"From: a@example.org\nTo: b@example.org\nSubject: x\n\nhi\n"})
    crawler(drop)
    lines = crawler.api.admin.get("/v1/datasets/test/entities/stream").content
    (tmp_path / "entities.json").write_bytes(lines)

    ftm = Path(sys.executable).parent / "ftm"
    command = [str(ftm), "validate", "-i", str(tmp_path / "entities.json")]
    done = subprocess.run(command, check=True, capture_output=True, timeout=120)

    read = [json.loads(line) for line in done.stdout.splitlines()]
    assert Counter(entity["schema"] for entity in read) == DOCUMENTS | {"Folder": 3, "Email": 1}
    names = {entity["id"]: entity["properties"]["fileName"][0] for entity in read}
    parents = {names[entity["id"]]: entity["properties"].get("parent") for entity in read}
    assert names[parents["письмо.eml"][0]] == "報告"
