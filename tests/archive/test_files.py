"""Files put into the archive and taken out."""

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
from tarn.datasets import registry as datasets
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
from tests.faults.scene import Killed, killed_at
from tests.in_process_api import ONE_DATABASE

LARGE = b"0123456789abcdef" * (SMALL // 8)
"""Twice what is kept in memory."""

STEPS = ("staged", "announced", "placed", "written", "recorded")


def pieces(content: bytes) -> Iterator[bytes]:
    for start in range(0, len(content), 100_000):
        yield content[start : start + 100_000]


@pytest.mark.contract("W5")
@pytest.mark.parametrize("content", [b"x", b"y" * SMALL, LARGE], ids=["tiny", "small", "large"])
def test_file_is_stored_under_its_checksum_with_a_record_that_says_all(desk: DatasetArchive, content: bytes):
    file = desk.put("press/Überblick.txt", pieces(content), origin="crawl", meta={"page": 1})

    assert file.checksum == hashlib.sha256(content).hexdigest()
    assert file.sha1 == hashlib.sha1(content).hexdigest()
    assert (file.path, file.name, file.size) == ("press/Überblick.txt", "Überblick.txt", len(content))
    assert (file.mime_type, file.origin, file.meta, file.tenant) == ("text/plain", "crawl", {"page": 1}, ADMIN)
    assert desk.content(file) == content
    assert desk.stored() == traces(file)
    record = desk.store.get(desk.dataset.layout.file_record(file.checksum, file.id))
    assert orjson.loads(record)["path"] == "press/Überblick.txt"
    assert desk.files() == [file]
    assert (desk.announced(), desk.used()) == (0, len(content))
    assert desk.tag() > file.created


@ONE_DATABASE
def test_content_at_two_paths_is_stored_once(desk: DatasetArchive):
    one, other = desk.put("a.txt"), desk.put("b.txt")

    assert one.checksum == other.checksum
    assert one.id != other.id
    assert desk.stored() == traces(one, other)
    assert desk.files(checksum=one.checksum) == [one, other]


@ONE_DATABASE
def test_path_with_another_content_has_both(desk: DatasetArchive):
    one, other = desk.put("a.txt", b"one"), desk.put("a.txt", b"other")

    assert {file.checksum for file in desk.files(path="a.txt")} == {one.checksum, other.checksum}
    assert desk.content(one) == b"one"


def test_same_file_again_is_the_record_that_is_there(desk: DatasetArchive):
    first = desk.put("a.txt", origin="crawl", meta={"page": 1})

    assert desk.put("a.txt") == first
    assert desk.files() == [first]
    assert desk.stored() == traces(first)
    assert desk.used() == first.size


@ONE_DATABASE
def test_same_file_with_other_words_changes_the_record_and_nothing_else(desk: DatasetArchive):
    first = desk.put("a.txt", origin="crawl", meta={"page": 1})

    changed = desk.put("a.txt", meta={"page": 2})

    assert changed == first.model_copy(update={"meta": {"page": 2}})
    assert desk.files() == [changed]
    record = desk.store.get(desk.dataset.layout.file_record(first.checksum, first.id))
    assert record == changed.to_json()


@ONE_DATABASE
@pytest.mark.parametrize("content", [b"content", LARGE], ids=["small", "large"])
def test_wrong_checksum_stores_nothing(desk: DatasetArchive, content: bytes):
    with pytest.raises(SchemaViolation, match="what arrived has") as refused:
        desk.put("a.txt", content, checksum="f" * 64)

    assert refused.value.members["errors"][0].field == "checksum"
    assert (desk.stored(), desk.files(), desk.used(), desk.tag()) == ([], [], 0, None)


@ONE_DATABASE
def test_right_checksum_is_no_hindrance(desk: DatasetArchive):
    checksum = Checksum(hashlib.sha256(LARGE).hexdigest())

    assert desk.put("a.txt", LARGE, checksum=checksum).checksum == checksum


@ONE_DATABASE
@pytest.mark.parametrize("chunks", [[], [b""], [b"", b""]])
def test_empty_file_is_a_file(desk: DatasetArchive, chunks: list[bytes]):
    file = desk.put("a.txt", chunks)

    assert (file.checksum, file.size, file.mime_type) == (hashlib.sha256().hexdigest(), 0, "text/plain")
    assert desk.content(file) == b""
    assert desk.put("a.txt", b"") == file
    assert (desk.stored(), desk.files()) == (traces(file), [file])
    assert (desk.used(), desk.announced()) == (0, 0)

    desk.delete(file)

    assert desk.files() == []


@ONE_DATABASE
@pytest.mark.contract("W3")
@pytest.mark.parametrize("size", [10, len(LARGE)])
def test_body_that_breaks_off_leaves_nothing(desk: DatasetArchive, size: int):
    def broken() -> Iterator[bytes]:
        yield b"x" * size
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        desk.put("a.txt", broken())

    assert (desk.stored(), desk.files(), desk.announced()) == ([], [], 0)


@ONE_DATABASE
@pytest.mark.parametrize("limit", [2000, SMALL + 2000])
def test_file_over_the_limit_is_refused_when_that_shows(desk: DatasetArchive, limit: int):
    taken = 0

    def endless() -> Iterator[bytes]:
        nonlocal taken
        while True:
            taken += 1000
            yield b"x" * 1000

    with pytest.raises(BodyTooLarge):
        desk.archive(max_file_bytes=limit).put(desk.dataset, ADMIN, new_file("a.txt"), endless())

    assert taken <= limit + 10_000
    assert (desk.stored(), desk.files()) == ([], [])


def test_file_over_the_quota_is_refused_and_leaves_nothing(desk: DatasetArchive):
    with pytest.raises(QuotaExceeded):
        desk.archive(quota_bytes=6).put(desk.dataset, ADMIN, new_file("a.txt"), [b"content"])

    assert (desk.stored(), desk.files(), desk.used(), desk.announced()) == ([], [], 0, 0)


@ONE_DATABASE
def test_many_files_of_one_commit_are_recorded_together(desk: DatasetArchive):
    archive = desk.archive()
    contents = [b"a", b"b", b"a", LARGE]
    staged = [archive.stage(desk.dataset, new_file(f"{n}.txt"), [data]) for n, data in enumerate(contents)]
    told: list[list[str]] = []

    made = archive.commit(desk.dataset, ADMIN, staged, lambda _, files: told.append([file.path for file in files]))

    assert [desk.content(file) for file in made] == contents
    assert told == [["0.txt", "1.txt", "2.txt", "3.txt"]]
    assert desk.files() == made
    assert desk.stored() == traces(*made)


@ONE_DATABASE
def test_same_file_twice_in_one_commit_is_one(desk: DatasetArchive):
    archive = desk.archive()
    staged = [archive.stage(desk.dataset, new_file("a.txt"), [b"a"]) for _ in range(3)]

    made = archive.commit(desk.dataset, ADMIN, staged)

    assert {file.id for file in made} == {desk.files()[0].id}
    assert (len(desk.files()), desk.used()) == (1, 1)


def test_delete_takes_the_record_and_leaves_the_content(desk: DatasetArchive):
    one, other = desk.put("a.txt"), desk.put("b.txt")
    before = desk.tag()

    desk.delete(one)

    assert desk.files() == [other]
    assert desk.stored() == traces(other)
    assert desk.used() == other.size
    assert desk.tag() > before
    with pytest.raises(FileNotFound):
        desk.delete(one)


def test_file_can_be_put_again_after_it_was_deleted(desk: DatasetArchive):
    desk.delete(desk.put("a.txt"))

    again = desk.put("a.txt")

    assert desk.files() == [again]
    assert desk.content(again) == b"content"


# Crashes and races


@pytest.mark.contract("W9")
@pytest.mark.parametrize("step", STEPS)
def test_put_killed_at_any_step_shows_no_half_file_and_is_finished_by_a_retry(desk: DatasetArchive, step: str):
    with pytest.raises(Killed):
        desk.archive(killed_at(step)).put(desk.dataset, ADMIN, new_file("a.txt"), pieces(LARGE))

    assert [desk.content(file) for file in desk.files()] == ([LARGE] if step == "recorded" else [])
    again = desk.put("a.txt", LARGE)
    assert desk.files() == [again]
    assert desk.content(again) == LARGE


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
def test_store_that_fails_leaves_no_trace_but_what_a_vacuum_takes(
    desk: DatasetArchive, method: str, glob: str, after: bool
):
    store = FaultyStore(desk.store)
    store.fail(method, glob, StorageFull("full"), after=after)

    with pytest.raises(StorageFull):
        desk.archive(store=store).put(desk.dataset, ADMIN, new_file("a.txt"), pieces(LARGE))

    assert (desk.files(), desk.announced(), desk.used()) == ([], 0, 0)
    assert not [path for path in desk.stored() if path.endswith(".json")]
    assert desk.content(desk.put("a.txt", LARGE)) == LARGE


@ONE_DATABASE
def test_what_cannot_be_recorded_is_not_there(desk: DatasetArchive):
    def refuse(*_: object) -> None:
        raise FileNotFound("no")

    with pytest.raises(FileNotFound):
        desk.archive().put(desk.dataset, ADMIN, new_file("a.txt"), [b"content"], refuse)

    assert (desk.files(), desk.announced(), desk.used()) == ([], 0, 0)
    assert [path.rsplit("/")[-1] for path in desk.stored()] == ["data"]


def test_put_that_a_delete_overtakes_begins_again(desk: DatasetArchive):
    file = desk.put("a.txt")
    overtake = iter([lambda: desk.delete(file)])

    def reached(step: str) -> None:
        if step == "written":
            next(overtake, lambda: None)()

    desk.archive(reached).put(desk.dataset, ADMIN, new_file("a.txt"), [b"content"])

    (again,) = desk.files()
    assert desk.stored() == traces(again)
    assert (desk.announced(), desk.used()) == (0, again.size)


@ONE_DATABASE
def test_put_into_a_dataset_that_is_deleted_meanwhile_is_refused(desk: DatasetArchive):
    identity = type("Identity", (), {"tenant": ADMIN, "key": None})()
    act = AuditedAction(identity, "delete_dataset", "test", "r")

    def reached(step: str) -> None:
        if step == "written":
            datasets.begin_delete(desk.database, desk.store, desk.dataset, None, act)

    with pytest.raises(DatasetNotFound):
        desk.archive(reached).put(desk.dataset, ADMIN, new_file("a.txt"), [b"content"])
    assert desk.files() == []


def test_many_at_once_put_the_same_content_once(desk: DatasetArchive):
    failures: list[TarnError] = []

    def put(number: int) -> None:
        try:
            desk.put(f"{number % 4}.txt", pieces(LARGE))
        except TarnError as error:
            failures.append(error)

    threads = [threading.Thread(target=put, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []
    found = desk.files()
    assert [file.path for file in found] == ["0.txt", "1.txt", "2.txt", "3.txt"]
    assert desk.stored() == traces(*found)
    assert (desk.announced(), desk.used()) == (0, 4 * len(LARGE))


# Conditions

NEW = Conditions(if_none_match="*")


def expire_claims(desk: DatasetArchive) -> None:
    """Let all announcements be of long ago."""
    with desk.database.write() as connection:
        connection.execute(update(file_puts).values(expires=now() - timedelta(seconds=1)))


def test_of_many_who_each_want_to_be_the_first_at_a_path_one_is(desk: DatasetArchive):
    ready = threading.Barrier(6)
    outcomes: list[ArchiveFile | PreconditionFailed] = []

    def all_there(step: str) -> None:
        if step == "written":
            ready.wait(30)

    def put(content: bytes) -> None:
        try:
            said = new_file("a.txt", conditions=NEW)
            outcomes.append(desk.archive(all_there).put(desk.dataset, ADMIN, said, [content]))
        except PreconditionFailed as error:
            outcomes.append(error)

    threads = [threading.Thread(target=put, args=[b"content %d" % (number // 2)]) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    (winner,) = [outcome for outcome in outcomes if isinstance(outcome, ArchiveFile)]
    assert len(outcomes) == 6
    assert desk.files() == [winner]
    assert [path for path in desk.stored() if path.endswith(".json")] == [f"{winner.checksum}/{winner.id}.json"]
    assert (desk.announced(), desk.used()) == (0, winner.size)


def test_who_wants_what_was_there_loses_to_a_delete_between_its_look_and_its_commit(desk: DatasetArchive):
    former = desk.put("a.txt", b"former")

    def reached(step: str) -> None:
        if step == "written":
            desk.delete(former)

    said = new_file("a.txt", conditions=Conditions(if_match=former.content_tag))
    with pytest.raises(PreconditionFailed):
        desk.archive(reached).put(desk.dataset, ADMIN, said, [b"content"])
    assert (desk.files(), desk.announced(), desk.used()) == ([], 0, 0)


@ONE_DATABASE
@pytest.mark.parametrize(("conditions", "step"), [(Conditions(), "written"), (NEW, "put")])
def test_file_whose_record_was_put_by_who_died_counts_as_there(desk: DatasetArchive, conditions: Conditions, step: str):
    with pytest.raises(Killed):
        said = new_file("a.txt", conditions=conditions)
        desk.archive(killed_at(step)).put(desk.dataset, ADMIN, said, [b"content"])

    for content in (b"content", b"other"):
        with pytest.raises(PreconditionFailed):
            desk.put("a.txt", content, conditions=NEW)
    assert desk.put("b.txt", conditions=NEW).path == "b.txt"
    expire_claims(desk)
    list(Collector(desk.database, desk.store, desk.settings).run(desk.dataset, now()))
    assert [(file.path, desk.content(file)) for file in desk.files(path="a.txt")] == [("a.txt", b"content")]


@ONE_DATABASE
def test_who_died_before_the_record_was_put_is_in_nobodys_way(desk: DatasetArchive):
    with pytest.raises(Killed):
        desk.archive(killed_at("written")).put(desk.dataset, ADMIN, new_file("a.txt", conditions=NEW), [b"content"])

    desk.put("a.txt", b"other", conditions=NEW)
    assert [desk.content(file) for file in desk.files()] == [b"other"]


# Looking


def test_files_are_listed_by_path_in_the_order_of_code_points(desk: DatasetArchive):
    paths = ["a", "a/b", "B", "ä", "я/я", "文件/報告.pdf", "😀", "a b", "z" * 300 + "1", "z" * 300 + "2"]
    for path in paths:
        desk.put(path)

    found = desk.files()

    assert [file.path for file in found] == sorted(paths)
    for number, file in enumerate(found):
        after = Position(file.path, file.id)
        assert desk.files(after=after) == found[number + 1 :]


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
def test_prefix_finds_what_begins_with_it_and_nothing_else(desk: DatasetArchive, prefix: str, expected: list[str]):
    for path in ("a/x", "a/y/z", "ab", "a%/x", "a\U0010ffffz", "\U0010ffff"):
        desk.put(path)

    assert [file.path for file in desk.files(prefix=prefix)] == expected


def test_prefix_longer_than_the_index_finds_what_begins_with_it(desk: DatasetArchive):
    for path in ("p" * 300 + "a", "p" * 300 + "b", "p" * 255, "p" * 299 + "q"):
        desk.put(path)

    assert [file.path[300:] for file in desk.files(prefix="p" * 300)] == ["a", "b"]


def test_path_of_the_greatest_length_is_kept(desk: DatasetArchive):
    longest = "я" * 2048

    file = desk.put(longest)

    assert desk.files(path=longest) == [file]
