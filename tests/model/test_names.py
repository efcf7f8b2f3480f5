"""Names of datasets, tenants and other resources."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tarn.model.names import (
    Checksum,
    DatasetName,
    DatasetPattern,
    FileName,
    LockName,
    Name,
    Origin,
    RefName,
    TagKey,
    TenantName,
)

KINDS: list[type[Name]] = [
    Checksum, DatasetName, DatasetPattern, FileName, LockName, Origin, RefName, TagKey, TenantName,
]  # fmt: skip
EVIL = ["", ".", "..", "../x", "/x", "x/", "a\x00b", "a\n", " a", "a b", "a'b", "a\\b", "é", "a" * 256, "-a", "a//b"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", EVIL)
def test_text_that_could_escape_its_folder_or_corrupt_a_log_is_refused(kind: type[Name], text: str):
    with pytest.raises(ValueError, match=kind.what):
        kind(text)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (DatasetName, "eu_authorities2"),
        (DatasetPattern, "press_*"),
        (TenantName, "open-aleph_1"),
        (Origin, "mapping:0a1b"),
        (Origin, "crawl"),
        (TagKey, "mappings/0a1b/last_processed"),
        (RefName, "release-1.2"),
        (FileName, "entities.ftm.json"),
        (Checksum, "0f" * 32),
    ],
)
def test_valid_names_are_unchanged(kind: type[Name], text: str):
    assert kind(text) == text
    assert isinstance(kind(text), kind)


@given(st.text(max_size=300))
def test_every_name_is_one_safe_path_segment_or_refused(text: str):
    for kind in KINDS:
        try:
            name = kind(text)
        except ValueError:
            continue
        segments = name.split("/") if kind is TagKey else [name]
        assert all(segment not in ("", ".", "..") and segment.isprintable() for segment in segments)


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("*", "anything", True),
        ("press_*", "press_leaks", True),
        ("press_*", "press", False),
        ("*_leaks", "press_leaks", True),
        ("a*c", "abc", True),
        ("abc", "abcd", False),
        ("*" * 60 + "b", "a" * 100, False),
    ],
)
def test_pattern_matches_whole_names(pattern: str, name: str, matches: bool):
    assert DatasetPattern(pattern).matches(name) is matches
