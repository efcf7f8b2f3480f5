"""Crawls: what lies below a place, taken into the archive once, whatever happens on the way."""

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
from tarn.archive.fetch import Fetcher
from tarn.archive.sources import Source
from tarn.db.tables import file_puts, journal_batches
from tarn.model.snapshot import Tally
from tarn.pipeline.tasks import crawl_files
from tarn.pipeline.tasks.crawl_files import fetch_files
from tarn.pipeline.tasks.crawl_tasks import FetchFiles
from tarn.pipeline.tasks.kernel import AnyTask, Output
from tarn.settings import Settings, load_settings
from tarn.storage.store import Store
from tarn.worker.flusher import SparkFlusher
from tarn.worker.loop import Worker

from tests.archive.web import answer, page, scripted
from tests.faults.scene import Killed, killed_at
from tests.in_process_api import ONE_DATABASE, InProcessApi
from tests.pipeline.kernels import DirectKernels
from tests.s3 import BUCKET, S3Server
from tests.worker.workers import fall_silent, make_worker

FILES = {"a.txt": b"first", "b/c.pdf": b"%PDF-1.4 \xff", "b/d/e.csv": b"x,y\n1,2\n", "b/d/f.txt": b"first"}
DOCUMENTS = {"Folder": 2, "PlainText": 2, "Pages": 1, "Table": 1}
FILES_URL = "/v1/datasets/test/files"


@pytest.fixture
def drop(tmp_path: Path) -> Path:
    """A folder that is open to crawls."""
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
def crawler(house: InProcessApi, kernels: DirectKernels, dataset: Any) -> "Crawler":
    return Crawler(house, kernels)


@dataclass(frozen=True)
class Crawler:
    """Asks for crawls of one dataset, has a worker do them, and looks what came of it."""

    house: InProcessApi
    kernels: Any

    @property
    def worker(self) -> Worker:
        services = self.house.services
        flusher = SparkFlusher(
            services.settings, services.database, services.store, "tester", kernels=lambda: self.kernels
        )
        return make_worker(self.house, flusher, flusher.maintenance())

    def ask(self, uri: str | Path, **options: Any) -> str:
        asked = self.house.admin.post("/v1/datasets/test/operations/crawl", {"uri": str(uri), **options})
        assert asked.status_code == 202, asked.text
        return str(asked.headers["Location"])

    def __call__(self, uri: str | Path, **options: Any) -> dict[str, Any]:
        """The result of a crawl that ends well."""
        place = self.ask(uri, **options)
        assert self.worker.step()
        return self.result(place)

    def result(self, place: str) -> dict[str, Any]:
        job = self.house.admin.get(place).json()
        assert job["state"] == "done", job
        result: dict[str, Any] = job["result"]
        return result

    def files(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.house.admin.get(f"{FILES_URL}?limit=1000").json()["results"]
        return found

    def contents(self) -> dict[str, bytes]:
        return {file["path"]: self._data(file) for file in self.files()}

    def entities(self) -> list[dict[str, Any]]:
        answer = self.house.admin.get("/v1/datasets/test/entities?limit=1000")
        found: list[dict[str, Any]] = answer.json()["results"]
        return found

    def schemata(self) -> dict[str, int]:
        return Counter(entity["schema"] for entity in self.entities())

    def tag(self, key: str) -> str | None:
        tags: dict[str, str] = self.house.admin.get("/v1/datasets/test/freshness").json()["tags"]
        return tags.get(key)

    def _data(self, file: dict[str, Any]) -> bytes:
        return self.house.admin.get(f"{FILES_URL}/{file['checksum']}/data").content


@dataclass(frozen=True)
class InProcessKernels:
    """Runs the tasks of crawls in this process, with whatever gets in their way."""

    store: Store
    cores: int = 1
    reached: Callable[[str], None] = lambda _: None
    changed: Callable[[FetchFiles], FetchFiles] = lambda task: task

    def run(self, slots: list[list[AnyTask]]) -> Iterator[tuple[int, Output]]:
        for task in (task for slot in slots for task in slot):
            assert isinstance(task, FetchFiles)
            made = fetch_files(self.changed(task), self.store, reached=self.reached)
            yield task.number, Output({}, Tally(), [], None, made)


def fill(folder: Path, files: dict[str, bytes]) -> None:
    for path, content in files.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)


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
    assert [(one["line"], one["value"]) for one in result["omitted"]["first"]] == [(None, "\u200b")] * 2
    assert all(one["reason"].startswith(reason) for one in result["omitted"]["first"])


@ONE_DATABASE
def test_crawl_that_ended_is_told_by_tags_and_a_record(crawler: Crawler, drop: Path, tmp_path: Path):
    fill(drop, FILES)
    assert crawler.tag("operations/crawl/last_run") is None

    place = crawler.ask(drop)
    crawler.worker.step()

    told = crawler.tag("operations/crawl/last_run")
    job = crawler.house.admin.get(place).json()
    assert told is not None
    assert job["started"] <= told <= str(crawler.tag("archive/last_updated")) <= job["finished"]
    assert job["progress"] == {"done": 4, "total": 4, "unit": "files"}
    shown = tmp_path / "lake/test/tags/lakehouse/operations/crawl/last_run"
    assert shown.read_text().startswith(told[:19])
    (run,) = (tmp_path / "lake/test/jobs/runs/crawl").iterdir()
    assert json.loads(run.read_bytes())["result"]["files"] == 4


@ONE_DATABASE
def test_known_path_is_skipped_unread_though_it_changed(crawler: Crawler, drop: Path):
    fill(drop, FILES)
    crawler(drop)
    fill(drop, {"a.txt": b"other", "new.txt": b"new"})

    assert count(crawler(drop)) == (1, 4, 0)
    assert crawler.contents() == FILES | {"new.txt": b"new"}


@ONE_DATABASE
def test_known_content_is_skipped_wherever_it_lies(crawler: Crawler, drop: Path):
    fill(drop, FILES)

    assert count(crawler(drop, existing="skip_checksum")) == (3, 1, 0)
    fill(drop, {"a.txt": b"other", "moved/c.pdf": FILES["b/c.pdf"]})

    assert count(crawler(drop, existing="skip_checksum")) == (1, 4, 0)
    assert [file["path"] for file in crawler.files()] == ["a.txt", "a.txt", "b/c.pdf", "b/d/e.csv"]


@ONE_DATABASE
def test_everything_is_taken_again_where_that_is_asked_for(crawler: Crawler, drop: Path):
    fill(drop, FILES)
    crawler(drop)
    fill(drop, {"a.txt": b"other"})

    assert count(crawler(drop, existing="overwrite", origin="again")) == (4, 0, 0)
    assert sorted(file["origin"] for file in crawler.files()) == ["again"] * 4 + ["crawl"]


@ONE_DATABASE
@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({"glob": ["*.txt"]}, ["a.txt", "b/d/f.txt"]),
        ({"glob": ["*.pdf", "b/*.csv"]}, ["b/c.pdf", "b/d/e.csv"]),
        ({"exclude": ["b/d/*"]}, ["a.txt", "b/c.pdf"]),
        ({"prefix": "b/d/"}, ["b/d/e.csv", "b/d/f.txt"]),
        ({"prefix": "b/", "glob": ["*.txt", "*.pdf"], "exclude": ["*c*"]}, ["b/d/f.txt"]),
        ({"glob": ["nothing"]}, []),
    ],
)
def test_only_what_is_wanted_is_taken(crawler: Crawler, drop: Path, options: dict[str, Any], taken: list[str]):
    fill(drop, FILES)

    assert count(crawler(drop, **options)) == (len(taken), 0, 0)
    assert [file["path"] for file in crawler.files()] == taken


@ONE_DATABASE
def test_what_cannot_be_taken_is_told_and_the_rest_is_taken(crawler: Crawler, drop: Path, tmp_path: Path):
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
def test_no_more_than_a_hundred_failures_are_listed(crawler: Crawler, drop: Path):
    fill(drop, {f"{number:03d}\\": b"x" for number in range(120)} | {"z": b"z"})

    result = crawler(drop)

    assert count(result) == (1, 0, 120)
    assert [failure["path"] for failure in result["first_failures"]] == [f"{number:03d}\\" for number in range(100)]


@ONE_DATABASE
def test_file_that_changes_while_it_is_read_is_a_failure_and_leaves_no_trace(
    house: InProcessApi, dataset: Any, drop: Path, store: Store
):
    fill(drop, FILES | {"log.txt": b"line\n"})

    @dataclass(frozen=True)
    class Disturbed:
        inner: Fetcher

        def open(self, uri: str) -> Source:
            source = self.inner.open(uri)
            if uri.endswith("log.txt"):
                with (drop / "log.txt").open("ab") as file:
                    file.write(b"more\n")
            return source

    def disturbed(task: FetchFiles) -> FetchFiles:
        return replace(task, fetcher=Disturbed(task.fetcher))  # type: ignore[arg-type]  # only `open` is asked of it

    crawler = Crawler(house, InProcessKernels(store, changed=disturbed))
    result = crawler(drop)

    assert count(result) == (4, 0, 1)
    assert result["first_failures"] == [{"path": "log.txt", "reason": "the file changed while it was read"}]
    assert crawler.contents() == FILES


@ONE_DATABASE
@pytest.mark.parametrize("step", ["staged", "announced", "placed", "written", "recorded"])
def test_crawl_killed_midway_is_finished_by_the_next_with_one_effect(
    house: InProcessApi, dataset: Any, drop: Path, store: Store, monkeypatch: pytest.MonkeyPatch, step: str
):
    monkeypatch.setattr(crawl_files, "TOGETHER", 2)
    fill(drop, FILES | {"z.bin": bytes(2 << 20)})
    reached = Counter[str]()

    def second(name: str) -> None:
        """Some are put, and others are on their way."""
        reached[name] += 1
        if reached["recorded"] or name == step == "recorded":
            killed_at(step)(name)

    place = Crawler(house, None).ask(drop)
    with pytest.raises(Killed):
        Crawler(house, InProcessKernels(store, reached=second)).worker.step()
    seen = Crawler(house, None).contents()
    assert len(seen) == 2
    assert seen.items() <= FILES.items()
    fall_silent(house)

    crawler = Crawler(house, InProcessKernels(store))
    crawler.worker.step()

    assert count(crawler.result(place)) == (3, 2, 0)
    assert crawler.contents() == FILES | {"z.bin": bytes(2 << 20)}
    assert crawler.schemata() == DOCUMENTS | {"Document": 1}
    with house.services.database.read() as connection:
        entities = connection.execute(select(func.sum(journal_batches.c.entities))).scalar_one()
        announced = connection.execute(select(func.count()).select_from(file_puts)).scalar_one()
    # Folders are told of by each attempt, documents by one. What was announced and died is a vacuum's to finish.
    assert entities == 8
    assert announced == (0 if step in ("staged", "recorded") else 2)


@ONE_DATABASE
def test_slow_crawl_goes_on_in_another_round(
    house: InProcessApi, dataset: Any, drop: Path, store: Store, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(crawl_files, "TOGETHER", 1)
    monkeypatch.setattr(crawl_files, "BUDGET", 0.0)
    fill(drop, FILES)

    crawler = Crawler(house, InProcessKernels(store))

    assert count(crawler(drop)) == (4, 0, 0)
    assert crawler.contents() == FILES


@ONE_DATABASE
def test_index_page_is_crawled_and_each_file_is_taken_once(crawler: Crawler):
    with scripted() as server:
        server.scripts = {
            "/files/": page("a.txt", "b/", "gone.txt", "http://example.org/elsewhere.txt", "/other/x.txt"),
            "/files/b/": page("c.pdf", "../a.txt", "../b/c.pdf"),
            "/files/a.txt": answer(b"first"),
            "/files/b/c.pdf": answer(b"%PDF-1.4 \xff"),
        }
        result = crawler(f"http://127.0.0.1:{server.port}/files/")
        asked = Counter(request.split()[1] for request in server.requests)

    assert count(result) == (2, 0, 1)
    assert result["first_failures"][0]["path"] == "gone.txt"
    assert crawler.contents() == {"a.txt": b"first", "b/c.pdf": b"%PDF-1.4 \xff"}
    assert asked == dict.fromkeys(("/files/", "/files/b/", "/files/a.txt", "/files/b/c.pdf", "/files/gone.txt"), 1)


@ONE_DATABASE
def test_prefix_of_a_store_is_crawled(crawler: Crawler, s3: S3Server):
    for path, content in FILES.items():
        s3.client().put_object(Bucket=BUCKET, Key=f"crawled/in/{path}", Body=content)

    assert count(crawler(f"s3://{BUCKET}/crawled/in", glob=["*.pdf", "*.txt"])) == (3, 0, 0)
    assert crawler.contents() == {path: FILES[path] for path in ("a.txt", "b/c.pdf", "b/d/f.txt")}


@ONE_DATABASE
def test_place_that_is_not_there_fails_the_job(crawler: Crawler, drop: Path):
    place = crawler.ask(drop / "nowhere")
    crawler.worker.step()

    job = crawler.house.admin.get(place).json()
    assert (job["state"], job["problem"]["type"]) == ("failed", "/problems/file-not-found")
    assert crawler.tag("operations/crawl/last_run") is None


@ONE_DATABASE
def test_quota_that_is_used_up_stops_the_crawl(crawler: Crawler, drop: Path):
    fill(drop, FILES)
    crawler.house.admin.put("/v1/admin/tenants/admin/limits", {"quota_bytes": 8})

    place = crawler.ask(drop)
    crawler.worker.step()

    job = crawler.house.admin.get(place).json()
    assert (job["state"], job["problem"]["type"]) == ("queued", "/problems/quota-exceeded")
    assert (crawler.files(), crawler.entities()) == ([], [])


@ONE_DATABASE
def test_large_file_over_the_quota_stops_the_crawl_unless_its_content_is_skipped(crawler: Crawler, drop: Path):
    large = bytes(2 << 20)
    fill(drop, {"large.bin": large})
    assert count(crawler(drop)) == (1, 0, 0)
    crawler.house.admin.put("/v1/admin/tenants/admin/limits", {"quota_bytes": len(large)})
    fill(drop, {"again.bin": large})

    assert count(crawler(drop, existing="skip_checksum")) == (0, 2, 0)
    fill(drop, {"other.bin": b"x" + large})
    place = crawler.ask(drop, existing="skip_checksum")
    crawler.worker.step()

    job = crawler.house.admin.get(place).json()
    assert (job["state"], job["problem"]["type"]) == ("queued", "/problems/quota-exceeded")
    assert [file["path"] for file in crawler.files()] == ["large.bin"]
    assert crawler.house.admin.get("/v1/admin/tenants/admin/limits").json()["used_bytes"] == len(large)
    assert not list(crawler.house.services.store.list("test/uploads"))


@ONE_DATABASE
def test_full_journal_lets_the_crawl_wait(crawler: Crawler, drop: Path):
    fill(drop, FILES)
    services = crawler.house.services
    full = replace(services, settings=services.settings.model_copy(update={"journal_max_rows": 1}))
    crawler.house.admin.post("/v1/datasets/test/entities", {"id": "a", "schema": "Person"})

    place = crawler.ask(drop)
    with_less = Crawler(InProcessApi(full, str(crawler.house.admin.key)), crawler.kernels)
    with_less.worker.step()

    job = crawler.house.admin.get(place).json()
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
def test_place_that_is_never_crawled_is_refused_at_once(crawler: Crawler, uri: str):
    answer = crawler.house.admin.post("/v1/datasets/test/operations/crawl", {"uri": uri})

    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "uri")
    assert "secret" not in answer.text
    assert not crawler.worker.step()


@ONE_DATABASE
def test_crawl_needs_maintain_and_is_not_there_for_others(crawler: Crawler, drop: Path):
    path = "/v1/datasets/test/operations/crawl"
    writer = crawler.house.tenant("writer", test="write")
    stranger = crawler.house.tenant("stranger", other="admin")
    keeper = crawler.house.tenant("keeper", test="maintain")

    assert writer.post(path, {"uri": str(drop)}).status_code == 403
    assert stranger.post(path, {"uri": str(drop)}).status_code == 404
    fill(drop, FILES)
    place = keeper.post(path, {"uri": str(drop)}).headers["Location"]
    crawler.worker.step()

    assert keeper.get(place).json()["result"]["files"] == 4
    assert {file["tenant"] for file in crawler.files()} == {"keeper"}
    assert keeper.get("/v1/whoami").json()["limits"]["used_bytes"] == sum(map(len, FILES.values()))
    assert stranger.get(FILES_URL).status_code == 404
    audited = crawler.house.admin.get("/v1/admin/audit?tenant=keeper").json()["results"]
    assert [entry["action"] for entry in audited] == ["crawl_dataset"] * 2


@ONE_DATABASE
def test_ftm_reads_the_documents_of_a_crawl(crawler: Crawler, drop: Path, tmp_path: Path):
    fill(drop, FILES | {"報告/письмо.eml": b"From: a@example.org\nTo: b@example.org\nSubject: x\n\nhi\n"})
    crawler(drop)
    lines = crawler.house.admin.get("/v1/datasets/test/entities/stream").content
    (tmp_path / "entities.json").write_bytes(lines)

    ftm = Path(sys.executable).parent / "ftm"
    command = [str(ftm), "validate", "-i", str(tmp_path / "entities.json")]
    done = subprocess.run(command, check=True, capture_output=True, timeout=120)

    read = [json.loads(line) for line in done.stdout.splitlines()]
    assert Counter(entity["schema"] for entity in read) == DOCUMENTS | {"Folder": 3, "Email": 1}
    names = {entity["id"]: entity["properties"]["fileName"][0] for entity in read}
    parents = {names[entity["id"]]: entity["properties"].get("parent") for entity in read}
    assert names[parents["письмо.eml"][0]] == "報告"
