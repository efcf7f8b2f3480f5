"""Versioned documents: a replaced content is kept as a version under its timestamp."""

from datetime import UTC, datetime, timedelta

import pytest
from tarn.errors import VersionNotFound
from tarn.model.datasets.dataset import Version
from tarn.model.datasets.export import ExportKind
from tarn.model.ids import stamp
from tarn.model.names import DatasetName, FileName
from tarn.storage.fault_injection import FaultyStore
from tarn.storage.layout import DatasetLayout
from tarn.storage.versions import list_versions, replace, replace_stream, replace_with, version_path

DS = DatasetLayout(DatasetName("ds"))
ENTITIES = DS.export(ExportKind.ENTITIES, "entities.ftm.json")
T0 = datetime(2025, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)
CONFIG = FileName("config.yml")
TICK = timedelta(microseconds=1)


def test_first_content_is_written_without_a_version(store):
    assert replace(store, DS.config, DS.versions, b"one", T0)
    assert store.get(DS.config) == b"one"
    assert list_versions(store, DS.versions) == []


def test_replaced_content_is_kept_under_the_timestamp(store):
    replace(store, DS.config, DS.versions, b"one", T0)
    replace(store, DS.config, DS.versions, b"two!", T0 + TICK)
    assert store.get(DS.config) == b"two!"
    assert store.get(f"ds/versions/2026/01/{stamp(T0 + TICK)}/config.yml") == b"one"


def test_equal_content_writes_nothing(store):
    faulty = FaultyStore(store)
    replace(faulty, DS.config, DS.versions, b"one", T0)
    faulty.calls.clear()
    assert not replace(faulty, DS.config, DS.versions, b"one", T0 + TICK)
    assert {call.method for call in faulty.calls} == {"get"}


def test_timestamp_in_use_is_incremented_and_no_version_is_overwritten(store):
    for content in (b"1", b"22", b"333", b"4444"):
        replace(store, DS.config, DS.versions, content, T0)
    versions = list_versions(store, DS.versions)
    assert versions == [Version(timestamp=stamp(T0 + n * TICK), name="config.yml", size=n + 1) for n in (2, 1, 0)]
    assert [store.get(version_path(DS.versions, version.timestamp, CONFIG)) for version in versions] == [
        b"333",
        b"22",
        b"1",
    ]


def test_versions_of_one_timestamp_are_listed_by_name_in_descending_order(store):
    for path in (DS.index, DS.config, ENTITIES):
        for content in (b"1", b"2"):
            replace(store, path, DS.versions, content, T0)
    assert [version.name for version in list_versions(store, DS.versions)] == [
        "index.json",
        "entities.ftm.json",
        "config.yml",
    ]


def test_check_that_raises_leaves_the_document_unchanged(store):
    replace(store, DS.config, DS.versions, b"one", T0)

    def refuse() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace(store, DS.config, DS.versions, b"two", T0, refuse)
    assert store.get(DS.config) == b"one"


@pytest.mark.parametrize("after", [False, True])
def test_crash_while_the_former_content_is_saved_leaves_the_document_unchanged(store, after):
    replace(store, DS.config, DS.versions, b"one", T0)
    faulty = FaultyStore(store)
    faulty.fail("put_new", "ds/versions/*", KeyboardInterrupt(), after=after)
    with pytest.raises(KeyboardInterrupt):
        replace(faulty, DS.config, DS.versions, b"two", T0)
    assert store.get(DS.config) == b"one"
    assert replace(store, DS.config, DS.versions, b"two", T0)
    assert store.get(DS.config) == b"two"


def test_crash_before_the_new_content_is_written_leaves_the_former_complete(store):
    replace(store, DS.config, DS.versions, b"one", T0)
    faulty = FaultyStore(store)
    faulty.fail("put", DS.config, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        replace(faulty, DS.config, DS.versions, b"two", T0)
    assert store.get(DS.config) == b"one"


def test_replace_with_an_object_keeps_the_former_content_and_the_source(store):
    for content, moment in ((b"one", T0), (b"two", T0), (b"three", T0)):
        store.put("ds/uploads/x/export", content)
        replace_with(store, ENTITIES, DS.versions, "ds/uploads/x/export", moment)
    assert store.get(ENTITIES) == store.get("ds/uploads/x/export") == b"three"
    assert [
        store.get(version_path(DS.versions, version.timestamp, FileName(version.name)))
        for version in list_versions(store, DS.versions)
    ] == [b"two", b"one"]


def test_replace_with_a_stream_keeps_the_former_content_and_a_failed_one_changes_nothing(store):
    def broken():
        yield b"thr"
        raise KeyboardInterrupt

    assert replace_stream(store, ENTITIES, DS.versions, [b"o", b"ne"], T0) == 3
    assert replace_stream(store, ENTITIES, DS.versions, [b"two"], T0) == 3
    with pytest.raises(KeyboardInterrupt):
        replace_stream(store, ENTITIES, DS.versions, broken(), T0)

    assert store.get(ENTITIES) == b"two"
    oldest = list_versions(store, DS.versions)[-1]
    assert store.get(version_path(DS.versions, oldest.timestamp, FileName(oldest.name))) == b"one"


def test_versions_of_different_mappings_are_separate(store):
    mapping = DS.mapping_versions("abc")
    replace(store, DS.mapping("abc"), mapping, b"1", T0)
    replace(store, DS.mapping("abc"), mapping, b"2", T0)
    assert list_versions(store, DS.versions) == []
    assert [version.name for version in list_versions(store, mapping)] == ["mapping.yml"]


@pytest.mark.parametrize("moment", ["yesterday", "../../config.yml"])
def test_version_of_an_invalid_timestamp_is_not_found(moment):
    with pytest.raises(VersionNotFound):
        version_path(DS.versions, moment, CONFIG)
