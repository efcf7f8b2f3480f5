"""The manifest as a document: required fields, and an unchanged round trip."""

import math
from datetime import UTC, datetime
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from tarn.datasets.registry import Dataset
from tarn.errors import ManifestInvalid
from tarn.model.datasets.snapshot import (
    Column,
    Components,
    Counts,
    File,
    IncludedBatch,
    Snapshot,
    SnapshotOperation,
    Table,
)
from tarn.model.datasets.stage import NewStage, StageCommit
from tarn.model.metadata import DEEPEST
from tarn.model.names import DatasetName

from tests.lake.manifests import build

DATASET = Dataset("0190-dataset", DatasetName("donations"))

text = st.text(st.characters(codec="utf-8"), max_size=20)
count = st.integers(0, 2**53)
moments = st.datetimes(datetime(1970, 1, 1), datetime(9999, 1, 1), timezones=st.just(UTC))
finite = st.floats(allow_nan=False, allow_infinity=False)
scalars = st.one_of(text, st.integers(-(2**63), 2**63 - 1), finite, st.booleans())
json_values = st.recursive(
    st.none() | scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=10,
)
metadata = st.dictionaries(text, json_values, max_size=3)


def parts(model: type[BaseModel], **fields: st.SearchStrategy) -> st.SearchStrategy:
    return st.fixed_dictionaries(fields).map(lambda values: model(**values))


def maybe(strategy: st.SearchStrategy) -> st.SearchStrategy:
    return st.none() | strategy


columns = parts(Column, min=maybe(scalars), max=maybe(scalars), nulls=maybe(count), truncated=maybe(st.booleans()))
files = parts(
    File,
    path=text,
    size=count,
    partition=st.dictionaries(text, text, max_size=2),
    rows=count,
    columns=st.dictionaries(text, columns, max_size=2),
    checksum=maybe(text),
)
tables = parts(
    Table,
    version=count,
    files=st.lists(files, max_size=3),
    added=st.lists(text, max_size=2),
    removed=st.lists(text, max_size=2),
)
batches = parts(
    IncludedBatch,
    id=text,
    tenant=text,
    commit=count,
    message=maybe(text),
    metadata=metadata,
    entities=count,
    rows=count,
)
manifests = parts(
    Snapshot,
    components=parts(Components, checksum=maybe(st.just("sha256"))),
    dataset=st.just(DatasetName("donations")),
    dataset_id=text,
    id=text,
    seq=st.integers(1, 2**53),
    content=count,
    parent=maybe(text),
    created=moments,
    operation=st.sampled_from(SnapshotOperation),
    author=text,
    message=maybe(text),
    metadata=metadata,
    batches=st.lists(batches, max_size=2),
    segment=count,
    statements=tables,
    translog=tables,
    rows=parts(Counts, **dict.fromkeys(Counts.model_fields, count)),
    first_seen=maybe(moments),
    last_seen=maybe(moments),
)


@pytest.mark.contract("M1")
@settings(deadline=None)
@given(manifests)
def test_manifest_is_read_back_unchanged(manifest: Snapshot):
    stored = manifest.to_json()

    read = Snapshot.from_json("path", stored)

    assert read == manifest
    assert read.to_json() == stored


def document(**changes: Any) -> dict[str, Any]:
    """Return a stored manifest as JSON objects."""
    manifest: dict[str, Any] = orjson.loads(build(DATASET, build(DATASET), message="a message", **changes).to_json())
    return manifest


def invalid_field(manifest: Any) -> str:
    """Return the field for which a document is refused as a manifest."""
    with pytest.raises(ManifestInvalid) as caught:
        Snapshot.from_json("donations/snapshots/000000000002.json", orjson.dumps(manifest))
    assert caught.value.detail.startswith("donations/snapshots/000000000002.json: ")
    return str(caught.value.members["field"])


OPTIONAL = {
    *("parent", "message", "first_seen", "last_seen", "components.checksum", "batches.0.message"),
    *(f"{table}.files.0.{field}" for table in ("statements", "translog") for field in ("columns", "checksum")),
}


def field_paths(value: Any, prefix: str = "") -> list[str]:
    """Yield every field of a manifest by its dotted name, except below columns and metadata, whose names are free."""
    if isinstance(value, list):
        return field_paths(value[0], f"{prefix}0.") if value and isinstance(value[0], dict) else []
    paths = []
    for name, inner in value.items():
        paths.append(prefix + name)
        if isinstance(inner, dict | list) and name not in ("metadata", "columns", "partition", "partitioning"):
            paths += field_paths(inner, f"{prefix}{name}.")
    return paths


REQUIRED = sorted(set(field_paths(document())) - OPTIONAL)


def test_all_fields_but_a_few_are_required():
    assert {"format", "version", "metadata", "components.compression", "statements.files.0.rows"} < set(REQUIRED)
    assert len(REQUIRED) > 40


def without(dotted: str) -> dict[str, Any]:
    manifest = document()
    *path, last = dotted.split(".")
    inside: Any = manifest
    for step in path:
        inside = inside[int(step)] if isinstance(inside, list) else inside[step]
    del inside[last]
    return manifest


@pytest.mark.contract("M2", "M3", "M11")
@pytest.mark.parametrize("path", REQUIRED)
def test_manifest_without_a_required_field_is_invalid_and_names_it(path: str):
    assert invalid_field(without(path)) == path


@pytest.mark.contract("M11")
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"format": "lode-snapshot"}, "format"),
        ({"version": 2}, "version"),
        ({"seq": 0}, "seq"),
        ({"seq": "2"}, "seq"),
        ({"created": "2030-01-01T00:00:00"}, "created"),
        ({"operation": "merge"}, "operation"),
        ({"dataset": "../evil"}, "dataset"),
        ({"surprise": 1}, "surprise"),
        ({"rows": {"live": 1}}, "rows.added"),
    ],
)
def test_manifest_with_an_impossible_field_is_invalid_and_names_it(changes: dict[str, Any], field: str):
    assert invalid_field(document() | changes) == field


@pytest.mark.contract("M11")
@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 10_000])
def test_data_that_is_not_a_document_is_invalid_as_a_whole(data: bytes):
    with pytest.raises(ManifestInvalid) as caught:
        Snapshot.from_json("path", data)

    assert caught.value.members["field"] == "document"


@pytest.mark.contract("D3", "M3")
@pytest.mark.parametrize("value", [None, [], "{}"])
def test_stored_metadata_that_is_not_an_object_is_invalid_in_the_manifest_and_in_its_batches(value: Any):
    manifest = document()
    batch = manifest["batches"][0] | {"metadata": value}

    assert invalid_field(manifest | {"metadata": value}) == "metadata"
    assert invalid_field(manifest | {"batches": [batch]}) == "batches.0.metadata"


@pytest.mark.contract("D3", "M3")
def test_missing_stored_metadata_is_invalid_and_empty_metadata_is_kept():
    assert invalid_field(without("metadata")) == "metadata"
    assert invalid_field(without("batches.0.metadata")) == "batches.0.metadata"
    assert document()["metadata"] == {}


@pytest.mark.contract("M2")
def test_first_manifest_has_no_parent_and_its_timestamp_is_in_utc():
    first = orjson.loads(build(DATASET).to_json())

    assert "parent" not in first
    assert first["created"] == "2030-01-01T00:00:01Z"
    assert (first["format"], first["version"], first["dataset"], first["seq"]) == ("tarn-snapshot", 1, "donations", 1)


NOT_JSON = [math.nan, math.inf, -math.inf]


@pytest.mark.contract("M8")
@pytest.mark.parametrize("number", NOT_JSON)
def test_bound_that_is_not_a_json_number_is_refused(number: float):
    with pytest.raises(ValidationError):
        Column(min=number)


@pytest.mark.contract("M8")
@pytest.mark.parametrize("token", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
@pytest.mark.parametrize("around", [b"?", b'[1,{"b":?}]'])
def test_stored_metadata_with_a_number_that_is_not_json_is_invalid(token: bytes, around: bytes):
    metadata = b'"metadata":{"a":' + around.replace(b"?", token) + b"}"

    with pytest.raises(ManifestInvalid) as caught:
        Snapshot.from_json("path", orjson.dumps(document()).replace(b'"metadata":{}', metadata))

    assert caught.value.members["field"] == "metadata"


def nested(levels: int) -> dict[str, Any]:
    inner: Any = 1
    for _ in range(levels - 1):
        inner = [inner]
    return {"a": inner}


@pytest.mark.contract("M8")
@pytest.mark.parametrize(
    ("value", "reason"),
    [
        *(({"a": number}, "a is NaN or infinite") for number in NOT_JSON),
        ({"a": {"b": [1, {"c": math.nan}]}}, "a.b.1.c is NaN or infinite"),
        ({"a": 2**64}, "a is an integer of more than 64 bits"),
        ({"a": [-(2**63) - 1]}, "a.0 is an integer of more than 64 bits"),
        ({"a": object()}, "a is not a JSON value"),
        (nested(DEEPEST + 1), f"nested more than {DEEPEST} levels deep"),
    ],
)
@pytest.mark.parametrize("model", [NewStage, StageCommit])
def test_metadata_that_is_not_preserved_by_readers_is_refused_with_its_path(model: type[BaseModel], value, reason: str):
    with pytest.raises(ValidationError) as caught:
        model.model_validate({"stages": ["x"], "metadata": value} if model is StageCommit else {"metadata": value})

    fault = caught.value.errors()[0]
    assert fault["loc"] == ("metadata",)
    assert reason in fault["msg"]


@pytest.mark.parametrize("value", [2**64 - 1, -(2**63), 0.1, nested(DEEPEST - 1), None, "\x00"])
def test_metadata_at_the_limits_is_read_back_unchanged(value: Any):
    given_ = NewStage(metadata={"a": value}).metadata

    manifest = build(DATASET, metadata=given_)

    assert Snapshot.from_json("path", manifest.to_json()).metadata == {"a": value}
