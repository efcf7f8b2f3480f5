"""Mapping jobs: the statements of a file's rows become visible together, and replace those of the previous run."""

import csv
import gzip
import hashlib
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import openpyxl
import pytest
from sqlalchemy import func, select
from tarn.datasets.registry import Dataset
from tarn.db.tables import journal, journal_batches, journal_packs, tags
from tarn.errors import QuotaExceeded, TarnError, Unavailable
from tarn.model.names import Checksum
from tarn.model.work.job import Job, JobStopped, MappingOptions, MappingResult
from tarn.pipeline.jobs import mapping as processing
from tarn.pipeline.jobs.mapping import UNCHANGED, Mappings
from tarn.pipeline.tasks.task import Task

from tests.in_process_api import InProcessApi
from tests.pipeline.kernels import DirectKernels
from tests.pipeline.test_rewrite import ignore

ONE_DATABASE = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)

COMPANIES = {
    "entities": {
        "company": {
            "schema": "Company",
            "key": "number",
            "properties": {
                "name": {"column": "company"},
                "jurisdiction": {"column": "land"},
                "incorporationDate": {"column": "founded", "format": "%d.%m.%Y"},
            },
        },
        "owner": {
            "schema": "Person",
            "id_column": "owner",
            "properties": {"name": {"columns": ["first", "last"], "join": " "}},
        },
        "owning": {
            "schema": "Ownership",
            "keys": ["number", "owner"],
            "key_literal": "owning",
            "properties": {"owner": {"entity": "owner", "required": True}, "asset": {"entity": "company"}},
        },
    },
    "filters_not": {"land": "nowhere"},
}  # fmt: skip
HEADER = "number,company,land,founded,owner,first,last"


def row(number: int, **fields: str) -> list[str]:
    given = {"company": f"Company {number}", "land": "Germany", "founded": "31.01.2001", "owner": f"p{number}"}
    named = given | {"first": "Ann", "last": f"Öz \"{number}\",\nB"} | fields  # fmt: skip
    return [str(number), *(named[name] for name in HEADER.split(",")[1:])]


def table(rows: list[list[str]], delimiter: str = ",", ends: str = "\r\n") -> bytes:
    written = io.StringIO()
    writer = csv.writer(written, delimiter=delimiter, lineterminator=ends)
    writer.writerows([HEADER.split(","), *rows])
    return written.getvalue().encode()


ROWS = [row(1), row(2, land="fr", owner=""), row(3, land="nowhere"), row(4, company="", founded="never")]


class MappingJobs:
    """A dataset with archived files, and the jobs that process mappings for them."""

    def __init__(self, api: InProcessApi, dataset: Dataset, kernels: DirectKernels) -> None:
        self.api = api
        self.dataset = dataset
        self.kernels = kernels

    def put(self, data: bytes, mapping: Any = COMPANIES) -> Checksum:
        """Store a file in the archive with a mapping, and return its checksum."""
        content_hash = Checksum(hashlib.sha256(data).hexdigest())
        self.api.services.store.put(self.dataset.layout.blob_data(content_hash), data)
        response = self.api.admin.put(f"/v1/datasets/test/mappings/{content_hash}", mapping)
        assert response.status_code in (200, 201), response.text
        return content_hash

    def job(self, content_hash: Checksum, **options: Any) -> Job:
        response = self.api.admin.post(f"/v1/datasets/test/mappings/{content_hash}/process", options)
        assert response.status_code == 202, response.text
        return Job.model_validate(response.json() | {"disturbed": None})

    def processing(
        self, kernels: Any = None, reached: Callable[[str], None] = lambda _: None, **changes: Any
    ) -> Mappings:
        services = self.api.services
        settings = services.settings.model_copy(update=changes)
        return Mappings(settings, services.database, services.store, lambda: kernels or self.kernels, reached)

    def run(self, job: Job, **how: Any) -> MappingResult:
        options = MappingOptions.model_validate(job.arguments)
        return self.processing(**how).run(job, self.dataset, options, ignore)

    def process(self, content_hash: Checksum, **options: Any) -> MappingResult:
        return self.run(self.job(content_hash, **options))

    def entities(self, **filters: str) -> dict[str, dict[str, Any]]:
        entities = self.api.admin.get("/v1/datasets/test/entities", params={"limit": 1000, **filters}).json()["results"]
        return {entity["id"]: entity for entity in entities}

    def invisible_rows(self) -> tuple[int, int]:
        """Return the numbers of rows and batches in the journal that are not visible."""
        with self.api.services.database.read() as connection:
            unseen = select(journal_batches.c.id).where(journal_batches.c.state.in_(("open", "staged")))
            counts = (
                select(func.count()).select_from(table).where(table.c.batch.in_(unseen))
                for table in (journal, journal_packs)
            )
            rows = sum(connection.execute(count).scalar_one() for count in counts)
            return rows, len(connection.execute(unseen).all())


@pytest.fixture
def mapping_jobs(api: InProcessApi, dataset: Dataset, kernels: DirectKernels) -> MappingJobs:
    return MappingJobs(api, dataset, kernels)


def entities_of_ftm(folder: Path, data: bytes, mapping: dict[str, Any]) -> dict[str, tuple[str, dict[str, list[str]]]]:
    """Return the entities that `ftm map-csv` makes of a file, merged by id."""
    (folder / "data.csv").write_bytes(data)
    (folder / "mapping.yml").write_text(json.dumps({"test": {"queries": [mapping]}}))
    ftm = Path(sys.executable).parent / "ftm"
    mapped = subprocess.run(
        [ftm, "map-csv", "--no-sign", "-d", "test", "-i", folder / "data.csv", folder / "mapping.yml"],
        capture_output=True, check=True,
    ).stdout  # fmt: skip
    entities: dict[str, tuple[str, dict[str, set[str]]]] = {}
    for line in mapped.splitlines():
        entity = json.loads(line)
        _, properties = entities.setdefault(entity["id"], (entity["schema"], {}))
        for name, values in entity["properties"].items():
            properties.setdefault(name, set()).update(values)
    return {name: (schema, _sorted(properties)) for name, (schema, properties) in entities.items()}


def _sorted(properties: dict[str, Any]) -> dict[str, list[str]]:
    return {name: sorted(values) for name, values in properties.items()}


def visible(mapping_jobs: MappingJobs) -> dict[str, tuple[str, dict[str, list[str]]]]:
    return {name: (entity["schema"], _sorted(entity["properties"])) for name, entity in mapping_jobs.entities().items()}


@pytest.mark.both_databases
def test_processing_equals_ftm_map_csv_before_and_after_a_flush(mapping_jobs: MappingJobs, flush, tmp_path: Path):
    data = table([*ROWS, *(row(number) for number in range(10, 60))])
    content_hash = mapping_jobs.put(data)

    result = mapping_jobs.process(content_hash)

    expected = entities_of_ftm(tmp_path, data, COMPANIES)
    assert visible(mapping_jobs) == expected
    assert (result.rows, result.entities, result.rejected, result.missing) == (54, len(expected), 0, [])
    assert {entity["origin"][0] for entity in mapping_jobs.entities().values()} == {f"mapping:{content_hash}"}
    (snapshot,) = flush()
    assert visible(mapping_jobs) == expected
    assert snapshot.rows.added == result.statements


def test_processing_again_replaces_the_previous_run_and_nothing_else(mapping_jobs: MappingJobs, flush):
    crawled = {"id": "p1", "schema": "Person", "properties": {"alias": "A"}}
    mapping_jobs.api.admin.post("/v1/datasets/test/entities?origin=crawl", crawled)
    content_hash = mapping_jobs.put(table(ROWS))
    mapping_jobs.process(content_hash)
    flush()
    companies = {name for name, entity in mapping_jobs.entities().items() if entity["schema"] == "Company"}
    only_people = {"entities": {"owner": COMPANIES["entities"]["owner"] | {"properties": {"notes": {"literal": "x"}}}}}
    mapping_jobs.put(table(ROWS), only_people)

    mapping_jobs.process(content_hash)

    for _ in range(2):
        entities = mapping_jobs.entities()
        assert companies
        assert companies.isdisjoint(entities)
        assert entities["p1"]["properties"] == {"alias": ["A"], "notes": ["x"]}
        assert set(entities) == {"p1", "p3", "p4"}
        flush()


def test_processing_is_skipped_while_nothing_changed_unless_forced(mapping_jobs: MappingJobs):
    content_hash = mapping_jobs.put(table(ROWS))
    first = mapping_jobs.process(content_hash)

    second = mapping_jobs.process(content_hash)
    otherwise = mapping_jobs.process(content_hash, encoding="latin-1")
    forced = mapping_jobs.process(content_hash, encoding="latin-1", force=True)

    assert (second.skipped, second.commit) == (UNCHANGED, None)
    assert first.skipped is otherwise.skipped is forced.skipped is None
    assert first.commit is not None
    shown = mapping_jobs.api.admin.get(f"/v1/datasets/test/mappings/{content_hash}").json()
    assert shown["fresh"]
    mapping_jobs.put(table(ROWS), COMPANIES | {"filters": {"land": "fr"}})
    assert not mapping_jobs.api.admin.get(f"/v1/datasets/test/mappings/{content_hash}").json()["fresh"]
    assert mapping_jobs.process(content_hash, encoding="latin-1").entities == 1


def test_tag_is_set_by_a_run_and_not_by_a_skipped_one(mapping_jobs: MappingJobs):
    content_hash = mapping_jobs.put(table(ROWS))

    def tagged() -> list[Any]:
        with mapping_jobs.api.services.database.read() as connection:
            key = tags.c.key == f"mappings/{content_hash}/last_processed"
            return list(connection.execute(select(tags.c.at).where(key, tags.c.tenant == "lakehouse")).scalars())

    assert tagged() == []
    mapping_jobs.process(content_hash)
    (at,) = tagged()
    mapping_jobs.process(content_hash)
    assert tagged() == [at]
    mirror = mapping_jobs.api.services.store.get(f"test/tags/lakehouse/mappings/{content_hash}/last_processed")
    assert mirror.decode() == at.isoformat()


@ONE_DATABASE
@pytest.mark.parametrize(
    ("written", "options"),
    [
        (lambda data: data, {}),
        (lambda data: b"\xef\xbb\xbf" + data, {}),
        (lambda data: data.replace(b"\r\n", b"\n"), {}),
        (lambda data: data.decode().replace("\r\n", "\r").encode(), {}),
        (lambda data: data.decode().encode("utf-16"), {}),
        (lambda data: data.decode().encode("utf-32"), {}),
        (lambda data: data.decode().encode("utf-16-le"), {"encoding": "UTF-16LE"}),
        (lambda data: data.decode().encode("latin-1"), {"encoding": "latin1"}),
        (lambda data: data.decode().encode("cp1252"), {"encoding": "windows-1252"}),
        (lambda data: gzip.compress(data), {}),
        (lambda data: gzip.compress(data[:50]) + gzip.compress(data[50:]), {}),
        (lambda data: gzip.compress(data.decode().encode("utf-16")), {}),
    ],
)
def test_file_has_the_same_entities_in_any_encoding_and_format(
    mapping_jobs: MappingJobs, written: Callable[[bytes], bytes], options: dict[str, str]
):
    original = table(ROWS)
    other = written(original)

    result = mapping_jobs.process(mapping_jobs.put(other), **options)

    assert (result.rows, result.rejected, result.missing) == (4, 0, [])
    names = {value for entity in mapping_jobs.entities().values() for value in entity["properties"].get("name", ())}
    assert 'Ann Öz "1", B' in names
    assert mapping_jobs.api.services.store.folders("test/uploads") == []


@ONE_DATABASE
@pytest.mark.parametrize("delimiter", [";", "\t", "|", "~"])
def test_delimiter_is_detected_by_the_header_or_named(mapping_jobs: MappingJobs, delimiter: str):
    content_hash = mapping_jobs.put(table(ROWS, delimiter))

    result = mapping_jobs.process(content_hash, **({"delimiter": "~"} if delimiter == "~" else {}))

    assert (result.rows, result.missing, len(mapping_jobs.entities())) == (4, [], 7)


def workbook(rows: Sequence[list[Any] | dict[int, Any]], title: str = "People") -> bytes:
    """Return a spreadsheet whose second sheet has these rows, as cells or by column; the first sheet is irrelevant."""
    workbook_file = openpyxl.Workbook()
    workbook_file.active.append(["nothing"])
    sheet = workbook_file.create_sheet(title)
    for cells in rows:
        sheet.append(cells)
    written = io.BytesIO()
    workbook_file.save(written)
    return written.getvalue()


def repacked(data: bytes, **parts: bytes) -> bytes:
    """Return the same workbook with some parts replaced or added."""
    written = io.BytesIO()
    with ZipFile(io.BytesIO(data)) as old, ZipFile(written, "w", ZIP_DEFLATED) as new:
        former = {name: old.read(name) for name in old.namelist()}
        for name, content in (former | {name.replace("__", "/"): content for name, content in parts.items()}).items():
            new.writestr(name, content)
    return written.getvalue()


UNCLOSED = b'"""x,"y"w,"v\n'
"""A line that ends within a quote, whether or not it begins within one."""

ENTITY = b'<!DOCTYPE a [<!ENTITY b "c">]><a/>'
CELLS: list[list[Any]] = [
    HEADER.split(","),
    [1, "Company 1", "Germany", "31.01.2001", "p1", "Ann", 'Öz "1",\nB'],
    [],
    [2.0, "Company 2", "fr", None, "x" * 256, True, date(2001, 2, 3)],
    [3, "Company 3", "de", None, "p3", 2.5, datetime(2001, 2, 3, 4, 5)],
]


@ONE_DATABASE
def test_sheet_of_a_workbook_is_read_as_the_rows_it_displays(mapping_jobs: MappingJobs):
    result = mapping_jobs.process(mapping_jobs.put(workbook(CELLS)), sheet="People")

    assert (result.rows, result.rejected, result.missing) == (3, 1, [])
    assert [error.line for error in result.errors] == [4]
    names = {value for entity in mapping_jobs.entities().values() for value in entity["properties"].get("name", ())}
    assert names == {"Company 1", 'Ann Öz "1", B', "Company 3", "2.5 2001-02-03 04:05:00"}
    assert mapping_jobs.api.services.store.folders("test/uploads") == []


@ONE_DATABASE
def test_first_sheet_of_a_workbook_is_read_unless_another_is_named(mapping_jobs: MappingJobs):
    content_hash = mapping_jobs.put(workbook([[]]))
    with pytest.raises(TarnError, match=r"none of the columns .*\['nothing'\]"):
        mapping_jobs.process(content_hash)
    with pytest.raises(TarnError, match=r"there is no such sheet: .*'Sheet', 'People'"):
        mapping_jobs.process(content_hash, sheet="Persons")


@ONE_DATABASE
@pytest.mark.parametrize(
    ("data", "slug"),
    [
        (lambda: b"PK\x03\x04nonsense", "invalid-format"),
        (lambda: workbook(CELLS)[:-100], "invalid-format"),
        (lambda: repacked(workbook(CELLS), **{"xl__workbook.xml": b"<broken"}), "invalid-format"),
        (lambda: repacked(workbook(CELLS), **{"xl__styles.xml": ENTITY}), "invalid-format"),
        (
            lambda: repacked(workbook(CELLS), **{"xl__styles.xml": "<!DOCTYPE a><a/>".encode("utf-16")}),
            "invalid-format",
        ),
        (lambda: repacked(workbook(CELLS), **{"xl__media__bomb.png": b"\0" * 2_000_000}), "body-too-large"),
        (lambda: workbook([[""] * 16_000 + ["x"]] * 4), "body-too-large"),
        (lambda: workbook([{16_001: "x"}] * 100), "body-too-large"),
    ],
    ids=["nonsense", "cut off", "broken", "entities", "hidden", "bomb", "large", "wide"],
)
def test_malicious_workbook_changes_nothing_and_reports_why(
    mapping_jobs: MappingJobs, data: Callable[[], bytes], slug: str
):
    job = mapping_jobs.job(mapping_jobs.put(data()), sheet="People")

    with pytest.raises(TarnError) as failed:
        mapping_jobs.run(job, max_body_bytes=1_000_000)

    assert failed.value.slug == slug
    assert (mapping_jobs.entities(), mapping_jobs.invisible_rows()) == ({}, (0, 0))


@ONE_DATABASE
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"number," + b"x," * 16_384 + b"y\n1,2\n", "the first row names 16386 columns, at most 16384 are read"),
        (b"number," + b"x" * 5000 + b"\n1,2\n", "the first row, which is to name the columns, has no end within 4096"),
        (b"number,x\n" + UNCLOSED * 1000, "more than 100 quotes are not closed within 4096 bytes; the last is in the"),
    ],
    ids=["columns", "header", "quotes"],
)
def test_delimited_file_over_a_limit_is_refused_with_the_value(
    mapping_jobs: MappingJobs, monkeypatch: pytest.MonkeyPatch, data: bytes, reason: str
):
    in_blocks(mapping_jobs, monkeypatch, data, 512)
    job = mapping_jobs.job(mapping_jobs.put(data))

    with pytest.raises(TarnError, match=reason) as failed:
        mapping_jobs.run(job, max_record_bytes=4096 if len(data) < 30_000 else 1 << 20)

    assert reason in (failed.value.detail or "")
    assert (mapping_jobs.entities(), mapping_jobs.invisible_rows()) == ({}, (0, 0))


@ONE_DATABASE
def test_declared_size_of_a_workbook_is_not_trusted(mapping_jobs: MappingJobs):
    data = workbook(CELLS)
    with ZipFile(io.BytesIO(data)) as archive:
        sheet = archive.read("xl/worksheets/sheet2.xml")
    lying = re.sub(rb'<dimension ref="[^"]*"', b'<dimension ref="A1:XFD1048576"', sheet)
    assert lying != sheet

    result = mapping_jobs.process(
        mapping_jobs.put(repacked(data, **{"xl__worksheets__sheet2.xml": lying})), sheet="People"
    )

    assert (result.rows, result.rejected) == (3, 1)


def in_blocks(mapping_jobs: MappingJobs, monkeypatch: pytest.MonkeyPatch, data: bytes, size: int = 97) -> None:
    """Make the store return the file in small blocks, like a large one."""
    blocks = [data[start : start + size] for start in range(0, len(data), size)]
    monkeypatch.setattr(mapping_jobs.api.services.store, "stream", lambda *_, **__: iter(blocks))


@ONE_DATABASE
def test_rows_in_many_tasks_are_the_rows_of_the_file(
    mapping_jobs: MappingJobs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    data = table([row(number, last="x\n" * (number % 7) + '"') for number in range(200)])
    monkeypatch.setattr(processing, "TASK_BYTES", 1000)
    in_blocks(mapping_jobs, monkeypatch, data)

    result = mapping_jobs.process(mapping_jobs.put(data))

    assert (result.rows, result.rejected) == (200, 0)
    assert visible(mapping_jobs) == entities_of_ftm(tmp_path, data, COMPANIES)


@ONE_DATABASE
def test_bad_rows_are_counted_and_sampled_by_number_and_do_not_fail_the_run(
    mapping_jobs: MappingJobs, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(processing, "TASK_BYTES", 2000)
    rows = [row(number) for number in range(300)]
    for place in range(0, 300, 2):
        rows[place][4] = "x" * 256
    lines = table(rows).replace(b"Company 5,", b"Company \xff,")
    long = b"7," + b"x" * 5000 + b"\r\n"
    data = lines + long + b"\r\n" + b"9,last,de,,p9,a,b\r\n" + b'10,"no end' + b"\r\n" * 3000

    in_blocks(mapping_jobs, monkeypatch, data)
    job = mapping_jobs.job(mapping_jobs.put(data))
    result = mapping_jobs.run(job, max_record_bytes=4096)

    assert result.rows == 300 + 3
    assert result.rejected == 150 + 1 + 1 + 1
    assert len(result.errors) == 100
    first = {"line": 2, "field": "id", "reason": "is 256 characters long, at most 255 are allowed"}
    assert result.errors[0].model_dump() == first
    assert [error.line for error in result.errors[:5]] == [2, 4, 6, 7, 8]
    assert "encoding" in result.errors[3].reason
    assert "p9" in mapping_jobs.entities()


@ONE_DATABASE
def test_omitted_values_are_counted_and_listed_by_row(mapping_jobs: MappingJobs, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processing, "TASK_BYTES", 2000)
    rows = [row(number, last="x\ny") for number in range(300)]
    for place in range(0, 300, 2):
        rows[place][2] = "Atlantis"
    rows[1][3] = "20th century"
    rows[3][2] = "nowhere"
    data = b"\r\n" + table(rows).partition(b"\n")[2]
    data = HEADER.encode() + b"\r\n" + data + b"7," + b"x" * 5000 + b"\r\n" + b"9,last,Atlantis,,p9,a,b\r\n"
    in_blocks(mapping_jobs, monkeypatch, data)

    result = mapping_jobs.run(mapping_jobs.job(mapping_jobs.put(data)), max_record_bytes=4096)

    assert (result.rows, result.rejected) == (302, 1)
    omitted = result.omitted
    assert omitted.count == 152
    assert omitted.by_property == {"Company:jurisdiction": 151, "Company:incorporationDate": 1}
    assert len(omitted.first) == 100
    assert [(one.line, one.property, one.value) for one in omitted.first[:3]] == [
        (3, "Company:jurisdiction", "Atlantis"),
        (4, "Company:incorporationDate", "20th century"),
        (5, "Company:jurisdiction", "Atlantis"),
    ]
    assert mapping_jobs.run(mapping_jobs.job(mapping_jobs.put(data)), max_record_bytes=4096).omitted.count == 0, (
        "it is skipped"
    )


@ONE_DATABASE
def test_result_of_a_run_before_omitted_values_were_reported_can_be_read(mapping_jobs: MappingJobs):
    result = mapping_jobs.process(mapping_jobs.put(table(ROWS))).model_dump(mode="json")
    assert result["omitted"]["count"] == 1
    del result["omitted"]

    assert MappingResult.model_validate(result).omitted.count == 0


@ONE_DATABASE
@pytest.mark.parametrize(
    ("data", "slug"),
    [
        (b"", "schema-violation"),
        (b"\n\n", "schema-violation"),
        (b"%PDF-1.4\n%\xe2\xe3\n", "schema-violation"),
        (b"a,b\n1,2\n", "schema-violation"),
        (gzip.compress(table(ROWS))[:-9], "invalid-format"),
        (b"\x1f\x8bnonsense", "invalid-format"),
        (gzip.compress(b"x" * 3_000_000), "body-too-large"),
    ],
)
def test_file_that_cannot_be_mapped_changes_nothing_and_reports_why(mapping_jobs: MappingJobs, data: bytes, slug: str):
    content_hash = mapping_jobs.put(data)
    mapping_jobs.process(mapping_jobs.put(table(ROWS)))
    job = mapping_jobs.job(content_hash)

    with pytest.raises(TarnError) as failed:
        mapping_jobs.run(job, max_body_bytes=1_000_000)

    assert failed.value.slug == slug
    assert len(mapping_jobs.entities()) == 7
    assert mapping_jobs.invisible_rows() == (0, 0)


# Processes that die


class Killed(Exception):
    """The process is killed here."""


def kill_at(step: str) -> Callable[[str], None]:
    def reached(name: str) -> None:
        if name == step:
            raise Killed

    return reached


class LosingKernels:
    """Kernels that lose the last task and its files."""

    cores = 2

    def __init__(self, inner: DirectKernels) -> None:
        self._inner = inner

    def run(self, partitions: list[list[Task[Any]]]) -> Iterator[tuple[int, Any]]:
        yield from list(self._inner.run(partitions))[:-1]
        raise Killed


class RepeatingKernels(LosingKernels):
    """Kernels that run every task twice, and report the second run."""

    def run(self, partitions: list[list[Task[Any]]]) -> Iterator[tuple[int, Any]]:
        list(self._inner.run(partitions))
        yield from self._inner.run(partitions)


@pytest.mark.parametrize("step", ["staged", "mapped"])
def test_run_killed_before_its_commit_shows_nothing_and_is_completed_by_the_next(
    mapping_jobs: MappingJobs, step: str, monkeypatch: pytest.MonkeyPatch
):
    job = mapping_jobs.job(mapping_jobs.put(table(ROWS)))
    monkeypatch.setattr(Mappings, "_abort_if_possible", lambda *_: None)  # no process is left to abort the stage

    with pytest.raises(Killed):
        mapping_jobs.run(job, reached=kill_at(step))

    assert mapping_jobs.entities() == {}
    assert mapping_jobs.invisible_rows()[1] > 0
    result = mapping_jobs.run(job)
    assert (result.entities, len(mapping_jobs.entities())) == (7, 7)
    assert mapping_jobs.invisible_rows() == (0, 0)


@pytest.mark.both_databases
def test_run_whose_end_was_not_recorded_is_not_repeated(mapping_jobs: MappingJobs):
    job = mapping_jobs.job(mapping_jobs.put(table(ROWS)), force=True)
    with pytest.raises(Killed):
        mapping_jobs.run(job, reached=kill_at("committed"))

    result = mapping_jobs.run(job)

    assert len(mapping_jobs.entities()) == 7
    with mapping_jobs.api.services.database.read() as connection:
        committed = select(journal_batches.c.commit).where(journal_batches.c.is_stage)
        assert connection.execute(committed).scalars().all() == [result.commit]


@pytest.mark.both_databases
def test_worker_presumed_dead_cannot_commit(mapping_jobs: MappingJobs):
    job = mapping_jobs.job(mapping_jobs.put(table(ROWS)), force=True)

    def overtaken(name: str) -> None:
        if name == "mapped":
            mapping_jobs.run(job)

    with pytest.raises(Unavailable):
        mapping_jobs.run(job, reached=overtaken)

    assert len(mapping_jobs.entities()) == 7
    assert mapping_jobs.invisible_rows() == (0, 0)


def test_lost_task_ends_the_attempt_and_leaves_nothing(mapping_jobs: MappingJobs):
    job = mapping_jobs.job(mapping_jobs.put(table(ROWS)))
    with pytest.raises(Killed):
        mapping_jobs.run(job, kernels=LosingKernels(mapping_jobs.kernels))

    assert mapping_jobs.entities() == {}
    assert mapping_jobs.invisible_rows() == (0, 0)
    assert mapping_jobs.run(job).entities == 7


@ONE_DATABASE
def test_part_of_a_repeated_task_is_not_committed(mapping_jobs: MappingJobs):
    result = mapping_jobs.run(
        mapping_jobs.job(mapping_jobs.put(table(ROWS))), kernels=RepeatingKernels(mapping_jobs.kernels)
    )

    assert mapping_jobs.api.admin.get("/v1/datasets/test/journal").json()["rows"] == result.statements + 1
    assert mapping_jobs.invisible_rows() == (0, 0)


@ONE_DATABASE
def test_cancelled_job_stops_and_shows_nothing(mapping_jobs: MappingJobs):
    job = mapping_jobs.job(mapping_jobs.put(table(ROWS)))

    def stopped(_: Any) -> None:
        raise JobStopped

    with pytest.raises(JobStopped):
        mapping_jobs.processing().run(job, mapping_jobs.dataset, MappingOptions.model_validate(job.arguments), stopped)

    assert (mapping_jobs.entities(), mapping_jobs.invisible_rows()) == ({}, (0, 0))


def test_run_counts_against_the_quota_of_its_tenant_or_shows_nothing(mapping_jobs: MappingJobs):
    tenant = mapping_jobs.api.tenant("miller", test="write")
    response = tenant.post(f"/v1/datasets/test/mappings/{mapping_jobs.put(table(ROWS))}/process")
    job = Job.model_validate(response.json() | {"disturbed": None})
    mapping_jobs.api.admin.put("/v1/admin/tenants/miller/limits", {"quota_statements": 10})

    with pytest.raises(QuotaExceeded):
        mapping_jobs.run(job)

    assert (mapping_jobs.entities(), mapping_jobs.invisible_rows()) == ({}, (0, 0))
    mapping_jobs.api.admin.put("/v1/admin/tenants/miller/limits", {"quota_statements": 1000})
    result = mapping_jobs.run(job)
    used_statements = mapping_jobs.api.admin.get("/v1/admin/tenants/miller/limits").json()["used_statements"]
    assert used_statements == result.statements


@ONE_DATABASE
def test_stage_of_a_run_cannot_be_committed_by_a_tenant(mapping_jobs: MappingJobs):
    listed: list[Any] = []

    def list_stages(name: str) -> None:
        if name == "staged":
            listed.append(mapping_jobs.api.admin.get("/v1/datasets/test/stages").json()["results"])

    job = mapping_jobs.job(mapping_jobs.put(table(ROWS)))
    mapping_jobs.run(job, reached=list_stages)

    assert listed == [[]]
