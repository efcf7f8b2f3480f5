"""Files that are put into the archive, read and deleted."""

import hashlib
import threading
from collections.abc import Iterator
from datetime import timedelta

import orjson
import pytest
from sqlalchemy import update
from tarn.access.audit import AuditedAction
from tarn.archive.file_index import Position
from tarn.archive.files import SMALL
from tarn.datasets import registry
from tarn.db.tables import file_puts
from tarn.errors import (
    BodyTooLarge,
    DatasetNotFound,
    FileNotFound,
    PreconditionFailed,
    QuotaExceeded,
    SchemaViolation,
    StorageFull,
    TarnError,
)
from tarn.integrity.archive_vacuum import Collector
from tarn.model.file import ArchiveFile
from tarn.model.ids import now
from tarn.model.names import Checksum
from tarn.model.preconditions import Conditions
from tarn.model.tenant import ADMIN
from tarn.storage.fault_injection import FaultyStore

from tests.archive.dataset_archive import DatasetArchive, new_file, traces
from tests.faults.scene import Killed, kill_at
from tests.in_process_api import ONE_DATABASE

LARGE = b"0123456789abcdef" * (SMALL // 8)
"""Twice what is kept in memory."""

STEPS = ("staged", "announced", "placed", "written", "recorded")


def pieces(content: bytes) -> Iterator[bytes]:
    for start in range(0, len(content), 100_000):
        yield content[start : start + 100_000]


@pytest.mark.contract("W5")
@pytest.mark.parametrize("content", [b"x", b"y" * SMALL, LARGE], ids=["tiny", "small", "large"])
def test_file_is_stored_under_its_checksum_with_a_complete_record(dataset_archive: DatasetArchive, content: bytes):
    file = dataset_archive.put("press/Überblick.txt", pieces(content), origin="crawl", meta={"page": 1})

    assert file.checksum == hashlib.sha256(content).hexdigest()
    assert file.sha1 == hashlib.sha1(content).hexdigest()
    assert (file.path, file.name, file.size) == ("press/Überblick.txt", "Überblick.txt", len(content))
    assert (file.mime_type, file.origin, file.meta, file.tenant) == ("text/plain", "crawl", {"page": 1}, ADMIN)
    assert dataset_archive.content(file) == content
    assert dataset_archive.stored() == traces(file)
    record = dataset_archive.store.get(dataset_archive.dataset.layout.file_record(file.checksum, file.id))
    assert orjson.loads(record)["path"] == "press/Überblick.txt"
    assert dataset_archive.files() == [file]
    assert (dataset_archive.announced(), dataset_archive.used()) == (0, len(content))
    assert dataset_archive.tag() > file.created


@ONE_DATABASE
def test_content_at_two_paths_is_stored_once(dataset_archive: DatasetArchive):
    one, other = dataset_archive.put("a.txt"), dataset_archive.put("b.txt")

    assert one.checksum == other.checksum
    assert one.id != other.id
    assert dataset_archive.stored() == traces(one, other)
    assert dataset_archive.files(checksum=one.checksum) == [one, other]


@ONE_DATABASE
def test_second_content_at_a_path_is_stored_next_to_the_first(dataset_archive: DatasetArchive):
    one, other = dataset_archive.put("a.txt", b"one"), dataset_archive.put("a.txt", b"other")

    assert {file.checksum for file in dataset_archive.files(path="a.txt")} == {one.checksum, other.checksum}
    assert dataset_archive.content(one) == b"one"


def test_repeated_put_returns_the_existing_record(dataset_archive: DatasetArchive):
    first = dataset_archive.put("a.txt", origin="crawl", meta={"page": 1})

    assert dataset_archive.put("a.txt") == first
    assert dataset_archive.files() == [first]
    assert dataset_archive.stored() == traces(first)
    assert dataset_archive.used() == first.size


@ONE_DATABASE
def test_repeated_put_with_other_metadata_changes_only_the_record(dataset_archive: DatasetArchive):
    first = dataset_archive.put("a.txt", origin="crawl", meta={"page": 1})

    changed = dataset_archive.put("a.txt", meta={"page": 2})

    assert changed == first.model_copy(update={"meta": {"page": 2}})
    assert dataset_archive.files() == [changed]
    record = dataset_archive.store.get(dataset_archive.dataset.layout.file_record(first.checksum, first.id))
    assert record == changed.to_json()


@ONE_DATABASE
@pytest.mark.parametrize("content", [b"content", LARGE], ids=["small", "large"])
def test_wrong_checksum_stores_nothing(dataset_archive: DatasetArchive, content: bytes):
    with pytest.raises(SchemaViolation, match="the received bytes have") as refused:
        dataset_archive.put("a.txt", content, checksum="f" * 64)

    assert refused.value.members["errors"][0].field == "checksum"
    assert (dataset_archive.stored(), dataset_archive.files(), dataset_archive.used(), dataset_archive.tag()) == (
        [],
        [],
        0,
        None,
    )


@ONE_DATABASE
def test_correct_checksum_is_accepted(dataset_archive: DatasetArchive):
    checksum = Checksum(hashlib.sha256(LARGE).hexdigest())

    assert dataset_archive.put("a.txt", LARGE, checksum=checksum).checksum == checksum


@ONE_DATABASE
@pytest.mark.parametrize("chunks", [[], [b""], [b"", b""]])
def test_empty_file_is_stored(dataset_archive: DatasetArchive, chunks: list[bytes]):
    file = dataset_archive.put("a.txt", chunks)

    assert (file.checksum, file.size, file.mime_type) == (hashlib.sha256().hexdigest(), 0, "text/plain")
    assert dataset_archive.content(file) == b""
    assert dataset_archive.put("a.txt", b"") == file
    assert (dataset_archive.stored(), dataset_archive.files()) == (traces(file), [file])
    assert (dataset_archive.used(), dataset_archive.announced()) == (0, 0)

    dataset_archive.delete(file)

    assert dataset_archive.files() == []


@ONE_DATABASE
@pytest.mark.contract("W3")
@pytest.mark.parametrize("size", [10, len(LARGE)])
def test_interrupted_body_leaves_nothing(dataset_archive: DatasetArchive, size: int):
    def broken() -> Iterator[bytes]:
        yield b"x" * size
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        dataset_archive.put("a.txt", broken())

    assert (dataset_archive.stored(), dataset_archive.files(), dataset_archive.announced()) == ([], [], 0)


@ONE_DATABASE
@pytest.mark.parametrize("limit", [2000, SMALL + 2000])
def test_file_over_the_limit_is_refused_as_soon_as_it_exceeds_it(dataset_archive: DatasetArchive, limit: int):
    read = 0

    def endless() -> Iterator[bytes]:
        nonlocal read
        while True:
            read += 1000
            yield b"x" * 1000

    with pytest.raises(BodyTooLarge):
        dataset_archive.archive(max_file_bytes=limit).put(dataset_archive.dataset, ADMIN, new_file("a.txt"), endless())

    assert read <= limit + 10_000
    assert (dataset_archive.stored(), dataset_archive.files()) == ([], [])


def test_file_over_the_quota_is_refused_and_leaves_nothing(dataset_archive: DatasetArchive):
    with pytest.raises(QuotaExceeded):
        dataset_archive.archive(quota_bytes=6).put(dataset_archive.dataset, ADMIN, new_file("a.txt"), [b"content"])

    assert (dataset_archive.stored(), dataset_archive.files(), dataset_archive.used(), dataset_archive.announced()) == (
        [],
        [],
        0,
        0,
    )


@ONE_DATABASE
def test_many_files_of_one_commit_are_recorded_together(dataset_archive: DatasetArchive):
    archive = dataset_archive.archive()
    contents = [b"a", b"b", b"a", LARGE]
    staged = [archive.stage(dataset_archive.dataset, new_file(f"{n}.txt"), [data]) for n, data in enumerate(contents)]
    reported: list[list[str]] = []

    created = archive.commit(
        dataset_archive.dataset, ADMIN, staged, lambda _, files: reported.append([file.path for file in files])
    )

    assert [dataset_archive.content(file) for file in created] == contents
    assert reported == [["0.txt", "1.txt", "2.txt", "3.txt"]]
    assert dataset_archive.files() == created
    assert dataset_archive.stored() == traces(*created)


@ONE_DATABASE
def test_same_file_twice_in_one_commit_is_one(dataset_archive: DatasetArchive):
    archive = dataset_archive.archive()
    staged = [archive.stage(dataset_archive.dataset, new_file("a.txt"), [b"a"]) for _ in range(3)]

    created = archive.commit(dataset_archive.dataset, ADMIN, staged)

    assert {file.id for file in created} == {dataset_archive.files()[0].id}
    assert (len(dataset_archive.files()), dataset_archive.used()) == (1, 1)


def test_delete_removes_the_record_and_keeps_the_content(dataset_archive: DatasetArchive):
    one, other = dataset_archive.put("a.txt"), dataset_archive.put("b.txt")
    before = dataset_archive.tag()

    dataset_archive.delete(one)

    assert dataset_archive.files() == [other]
    assert dataset_archive.stored() == traces(other)
    assert dataset_archive.used() == other.size
    assert dataset_archive.tag() > before
    with pytest.raises(FileNotFound):
        dataset_archive.delete(one)


def test_file_can_be_put_again_after_it_was_deleted(dataset_archive: DatasetArchive):
    dataset_archive.delete(dataset_archive.put("a.txt"))

    again = dataset_archive.put("a.txt")

    assert dataset_archive.files() == [again]
    assert dataset_archive.content(again) == b"content"


# Crashes and races


@pytest.mark.contract("W9")
@pytest.mark.parametrize("step", STEPS)
def test_put_killed_at_any_step_leaves_no_partial_file_and_is_completed_by_a_retry(
    dataset_archive: DatasetArchive, step: str
):
    with pytest.raises(Killed):
        dataset_archive.archive(kill_at(step)).put(dataset_archive.dataset, ADMIN, new_file("a.txt"), pieces(LARGE))

    assert [dataset_archive.content(file) for file in dataset_archive.files()] == (
        [LARGE] if step == "recorded" else []
    )
    again = dataset_archive.put("a.txt", LARGE)
    assert dataset_archive.files() == [again]
    assert dataset_archive.content(again) == LARGE


@ONE_DATABASE
@pytest.mark.parametrize(
    ("method", "glob"),
    [
        ("put_stream", "*/uploads/*"),
        ("place_copy", "*/data"),
        ("sync", "*/data"),
        ("place", "*.json"),
        ("sync", "*.json"),
    ],
)
@pytest.mark.parametrize("after", [False, True])
def test_failing_store_leaves_only_objects_that_a_vacuum_deletes(
    dataset_archive: DatasetArchive, method: str, glob: str, after: bool
):
    store = FaultyStore(dataset_archive.store)
    store.fail(method, glob, StorageFull("full"), after=after)

    with pytest.raises(StorageFull):
        dataset_archive.archive(store=store).put(dataset_archive.dataset, ADMIN, new_file("a.txt"), pieces(LARGE))

    assert (dataset_archive.files(), dataset_archive.announced(), dataset_archive.used()) == ([], 0, 0)
    assert not [path for path in dataset_archive.stored() if path.endswith(".json")]
    assert dataset_archive.content(dataset_archive.put("a.txt", LARGE)) == LARGE


@ONE_DATABASE
def test_file_that_cannot_be_recorded_does_not_exist(dataset_archive: DatasetArchive):
    def refuse(*_: object) -> None:
        raise FileNotFound("no")

    with pytest.raises(FileNotFound):
        dataset_archive.archive().put(dataset_archive.dataset, ADMIN, new_file("a.txt"), [b"content"], refuse)

    assert (dataset_archive.files(), dataset_archive.announced(), dataset_archive.used()) == ([], 0, 0)
    assert [path.rsplit("/")[-1] for path in dataset_archive.stored()] == ["data"]


def test_put_concurrent_with_a_delete_is_restarted(dataset_archive: DatasetArchive):
    file = dataset_archive.put("a.txt")
    overtake = iter([lambda: dataset_archive.delete(file)])

    def reached(step: str) -> None:
        if step == "written":
            next(overtake, lambda: None)()

    dataset_archive.archive(reached).put(dataset_archive.dataset, ADMIN, new_file("a.txt"), [b"content"])

    (again,) = dataset_archive.files()
    assert dataset_archive.stored() == traces(again)
    assert (dataset_archive.announced(), dataset_archive.used()) == (0, again.size)


@ONE_DATABASE
def test_put_into_a_dataset_deleted_concurrently_is_refused(dataset_archive: DatasetArchive):
    identity = type("Identity", (), {"tenant": ADMIN, "key": None})()
    act = AuditedAction(identity, "delete_dataset", "test", "r")

    def reached(step: str) -> None:
        if step == "written":
            registry.begin_delete(dataset_archive.database, dataset_archive.store, dataset_archive.dataset, None, act)

    with pytest.raises(DatasetNotFound):
        dataset_archive.archive(reached).put(dataset_archive.dataset, ADMIN, new_file("a.txt"), [b"content"])
    assert dataset_archive.files() == []


def test_concurrent_puts_of_the_same_content_store_it_once(dataset_archive: DatasetArchive):
    failures: list[TarnError] = []

    def put(number: int) -> None:
        try:
            dataset_archive.put(f"{number % 4}.txt", pieces(LARGE))
        except TarnError as error:
            failures.append(error)

    threads = [threading.Thread(target=put, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []
    files = dataset_archive.files()
    assert [file.path for file in files] == ["0.txt", "1.txt", "2.txt", "3.txt"]
    assert dataset_archive.stored() == traces(*files)
    assert (dataset_archive.announced(), dataset_archive.used()) == (0, 4 * len(LARGE))


# Conditions

NEW = Conditions(if_none_match="*")


def expire_claims(dataset_archive: DatasetArchive) -> None:
    """Expire all claims of running puts."""
    with dataset_archive.database.write() as connection:
        connection.execute(update(file_puts).values(expires=now() - timedelta(seconds=1)))


def test_one_of_concurrent_conditional_creations_of_a_path_succeeds(dataset_archive: DatasetArchive):
    ready = threading.Barrier(6)
    outcomes: list[ArchiveFile | PreconditionFailed] = []

    def all_there(step: str) -> None:
        if step == "written":
            ready.wait(30)

    def put(content: bytes) -> None:
        try:
            message = new_file("a.txt", conditions=NEW)
            outcomes.append(dataset_archive.archive(all_there).put(dataset_archive.dataset, ADMIN, message, [content]))
        except PreconditionFailed as error:
            outcomes.append(error)

    threads = [threading.Thread(target=put, args=[b"content %d" % (number // 2)]) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    (winner,) = [outcome for outcome in outcomes if isinstance(outcome, ArchiveFile)]
    assert len(outcomes) == 6
    assert dataset_archive.files() == [winner]
    assert [path for path in dataset_archive.stored() if path.endswith(".json")] == [
        f"{winner.checksum}/{winner.id}.json"
    ]
    assert (dataset_archive.announced(), dataset_archive.used()) == (0, winner.size)


def test_conditional_put_fails_if_the_file_is_deleted_between_check_and_commit(dataset_archive: DatasetArchive):
    former = dataset_archive.put("a.txt", b"former")

    def reached(step: str) -> None:
        if step == "written":
            dataset_archive.delete(former)

    message = new_file("a.txt", conditions=Conditions(if_match=former.content_tag))
    with pytest.raises(PreconditionFailed):
        dataset_archive.archive(reached).put(dataset_archive.dataset, ADMIN, message, [b"content"])
    assert (dataset_archive.files(), dataset_archive.announced(), dataset_archive.used()) == ([], 0, 0)


@ONE_DATABASE
@pytest.mark.parametrize(("conditions", "step"), [(Conditions(), "written"), (NEW, "put")])
def test_file_recorded_by_a_killed_put_counts_as_existing(
    dataset_archive: DatasetArchive, conditions: Conditions, step: str
):
    with pytest.raises(Killed):
        message = new_file("a.txt", conditions=conditions)
        dataset_archive.archive(kill_at(step)).put(dataset_archive.dataset, ADMIN, message, [b"content"])

    for content in (b"content", b"other"):
        with pytest.raises(PreconditionFailed):
            dataset_archive.put("a.txt", content, conditions=NEW)
    assert dataset_archive.put("b.txt", conditions=NEW).path == "b.txt"
    expire_claims(dataset_archive)
    list(
        Collector(dataset_archive.database, dataset_archive.store, dataset_archive.settings).run(
            dataset_archive.dataset, now()
        )
    )
    assert [(file.path, dataset_archive.content(file)) for file in dataset_archive.files(path="a.txt")] == [
        ("a.txt", b"content")
    ]


@ONE_DATABASE
def test_put_killed_before_the_record_does_not_block_others(dataset_archive: DatasetArchive):
    with pytest.raises(Killed):
        dataset_archive.archive(kill_at("written")).put(
            dataset_archive.dataset, ADMIN, new_file("a.txt", conditions=NEW), [b"content"]
        )

    dataset_archive.put("a.txt", b"other", conditions=NEW)
    assert [dataset_archive.content(file) for file in dataset_archive.files()] == [b"other"]


# Listing


def test_files_are_listed_by_path_in_the_order_of_code_points(dataset_archive: DatasetArchive):
    paths = ["a", "a/b", "B", "ä", "я/я", "文件/報告.pdf", "😀", "a b", "z" * 300 + "1", "z" * 300 + "2"]
    for path in paths:
        dataset_archive.put(path)

    files = dataset_archive.files()

    assert [file.path for file in files] == sorted(paths)
    for number, file in enumerate(files):
        after = Position(file.path, file.id)
        assert dataset_archive.files(after=after) == files[number + 1 :]


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("", ["a%/x", "a/x", "a/y/z", "ab", "a\U0010ffffz", "\U0010ffff"]),
        ("a", ["a%/x", "a/x", "a/y/z", "ab", "a\U0010ffffz"]),
        ("a/", ["a/x", "a/y/z"]),
        ("a%", ["a%/x"]),
        ("a\U0010ffff", ["a\U0010ffffz"]),
        ("\U0010ffff", ["\U0010ffff"]),
        ("_", []),
    ],
)
def test_prefix_selects_exactly_the_paths_that_begin_with_it(
    dataset_archive: DatasetArchive, prefix: str, expected: list[str]
):
    for path in ("a/x", "a/y/z", "ab", "a%/x", "a\U0010ffffz", "\U0010ffff"):
        dataset_archive.put(path)

    assert [file.path for file in dataset_archive.files(prefix=prefix)] == expected


def test_prefix_longer_than_the_index_selects_the_paths_that_begin_with_it(dataset_archive: DatasetArchive):
    for path in ("p" * 300 + "a", "p" * 300 + "b", "p" * 255, "p" * 299 + "q"):
        dataset_archive.put(path)

    assert [file.path[300:] for file in dataset_archive.files(prefix="p" * 300)] == ["a", "b"]


def test_path_of_maximum_length_is_stored(dataset_archive: DatasetArchive):
    longest = "я" * 2048

    file = dataset_archive.put(longest)

    assert dataset_archive.files(path=longest) == [file]
