"""Dataset configurations, and the YAML documents that store them."""

from datetime import UTC, datetime

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError
from tarn.model import document
from tarn.model.datasets.dataset import CatalogMetadata, DatasetChange, DatasetConfig, DatasetMetadata
from tarn.model.entity_tags import matches, matches_none_match

CONFIG = {"name": "donations", "id": "1", "created": datetime(2030, 1, 1, tzinfo=UTC)}

AWKWARD = st.sampled_from([*"\n\t :-#'\"\\,[]{}&*!|>%@`?=~", "\u2028", "\u2029", "\ufeff", "\uffff", "\U0001f600"])
TEXT = st.text(st.characters(exclude_categories=["Cc", "Cs"]) | AWKWARD)


@given(TEXT, st.lists(TEXT.filter(lambda text: len(text) <= 200)))
@example("a\u2028b", [" leading", "trailing ", "no", "1e3", "2030-01-01", "null", "=", ""])
@example("word " * 1000, ["\n", "\t", "\ta\n\n b\n"])
def test_every_accepted_text_is_read_back_unchanged(text: str, tags: list[str]):
    config = DatasetConfig.model_validate(CONFIG | {"description": text, "tags": tags})
    catalog = CatalogMetadata.model_validate({"summary": text})

    assert DatasetConfig.from_yaml(config.to_yaml()) == config
    assert CatalogMetadata.from_yaml(catalog.to_yaml()) == catalog


@given(st.characters(categories=["Cc"]).filter(lambda character: character not in "\n\t"))
def test_control_characters_are_refused_in_every_text(character: str):
    text = f"a{character}b"
    given_in = [{"description": text}, {"tags": ["fine", text]}, {"publisher": {"name": text}}]

    for body in [*given_in, {"coverage": {"schedule": text}}, {"title": text}, {"category": text}]:
        with pytest.raises(ValidationError, match="control characters"):
            DatasetMetadata.model_validate(body)
    with pytest.raises(ValidationError, match="control characters"):
        CatalogMetadata.model_validate({"summary": text})


def test_null_resets_every_field_to_its_default():
    changed = DatasetConfig.model_validate(
        CONFIG
        | {"title": "x", "license": "https://e.org/", "summary": "x", "description": "x", "url": "https://e.org/"}
        | {"category": "x", "tags": ["x"], "publisher": {"name": "x"}, "coverage": {"end": "2030"}, "children": ["x"]}
        | {"deprecated": True, "deprecation": "x", "checksum": "sha256", "compression": "zstd"}
        | {"target_file_bytes": 1 << 20, "policy": {"maintain": False}}
    )
    nothing = DatasetChange.model_validate(dict.fromkeys(DatasetMetadata.model_fields))

    assert changed.model_dump(exclude_defaults=True).keys() == DatasetConfig.model_fields.keys()
    assert DatasetConfig.model_validate(nothing.applied_to(changed)) == DatasetConfig.model_validate(CONFIG)


@pytest.mark.parametrize(
    ("header", "strongly", "weakly"),
    [
        ('"a"', True, True),
        ('W/"a"', False, True),
        ('"b", "a"', True, True),
        ('"b", W/"a"', False, True),
        ("*", True, True),
        ('"b"', False, False),
        ("a", False, False),
    ],
)
def test_if_match_compares_strongly_and_if_none_match_weakly(header: str, strongly: bool, weakly: bool):
    assert (matches(header, '"a"'), matches_none_match(header, '"a"')) == (strongly, weakly)


def test_libyaml_reads_and_writes_documents():
    """Check that libyaml is in use: pure Python takes a second for a megabyte, inside a transaction."""
    assert issubclass(document.Parser, yaml.CSafeLoader)
    assert issubclass(document.Dumper, yaml.CSafeDumper)
