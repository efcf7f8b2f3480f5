"""YAML: only the types of JSON, an unchanged round trip, and bounded time and memory."""

import re
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tarn.cli.input.yaml_reader import parse
from tarn.model import document
from tarn.model.document import STORED, InvalidYaml, YamlLimits, check_size, load

AMBIGUOUS = [
    "1e5", "1.0e5", "1.5e+3", "1_000", "010", "0o17", "0x1F", "1:30", "12:30:45", "1:59.5", "2020-01-01", "<<", "=",
    "2020-01-01T10:00:00Z", "no", "yes", "on", "off", "y", "n", "True", "Null", "~", "", ".5", "5.", "+5", "-0", ".inf",
    ".nan", "1.5", "-12", "null", "- a", "a: b", "#x", "&a", "*a", "!x", "%x", "\u00fc", "\U0001f600",
]  # fmt: skip
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63) + 1, (1 << 63) - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(AMBIGUOUS),
    st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=20),
)
KEYS = st.one_of(
    st.sampled_from(AMBIGUOUS), st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=8)
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=8
)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_document_is_read_back_unchanged(data: dict[str, Any]):
    assert load(document.dump(data), STORED) == data


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"), ("Yes", "Yes"), ("on", "on"), ("1:59:59", "1:59:59"), ("1:59.5", "1:59.5"), ("010", "010"),
        ("0o17", "0o17"), ("0x1F", "0x1F"), ("1_000", "1_000"), ("2020-01-01", "2020-01-01"), ("1e5", "1e5"),
        (".inf", ".inf"), ("+5", "+5"), ("2020-13-45", "2020-13-45"), ("=", "="),
        ("true", True), ("False", False), ("null", None), ("~", None), ("", None), ("-12", -12), ("1.5", 1.5),
        ("1.5e+3", 1500.0), ("'12'", "12"), ("!!str 12", "12"), ("! 12", "12"), ("{2020: a, no: b, ~: c}", None),
    ],
)  # fmt: skip
def test_scalar_has_a_type_only_if_both_versions_of_yaml_agree(text: str, value: Any):
    expected = {"2020": "a", "no": "b", "~": "c"} if text.startswith("{") else value
    assert load(f"a: {text}") == {"a": expected}
    assert parse(f"a: {text}") == {"a": expected}


@settings(deadline=None)
@given(st.text("0123456789+-.eE:_xonytrufalsNUL~", max_size=12))
def test_typed_scalar_has_the_type_of_pyyaml(text: str):
    try:
        document = load(text)
    except InvalidYaml:
        return
    if not isinstance(document, str | dict | list):
        assert yaml.safe_load(text) == document


def test_alias_is_replaced_by_the_value_of_its_anchor():
    assert load("a: &x {b: [1]}\nc: *x\nd: [*x, &y z, *y]") == {
        "a": {"b": [1]},
        "c": {"b": [1]},
        "d": [{"b": [1]}, "z", "z"],
    }


M = 1 << 20
LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
HOSTILE = {
    "base 60": ("a: 1" + ":59" * (M // 3 - 10), "a scalar is 1048546 characters long, at most 131072 are read"),
    "base 60 float": ("a: 1" + ":59" * (M // 3 - 10) + ".5", "a scalar is"),
    "digits": ("a: " + "9" * 100_000, "the integer '999"),
    "65 bits": ("a:\n  9223372036854775808", "line 2: the integer '9223372036854775808' has more than 64 bits"),
    "long float": ("a: 1." + "9" * 100_000, "the number '1.999"),
    "infinite": ("a: 1.0e+999", "the number '1.0e+999'"),
    "nodes": ("[" + "[]," * (M // 3 - 2) + "]", "more than 50000 keys"),
    "keys": ("".join(f"k{number}: 1\n" for number in range(30_000)), "line 25000: it has more than 50000 keys"),
    "depth": ("[" * M, "nested more than 50 deep"),
    "blocks": ("- " * (M // 2), "nested more than 50 deep"),
    "laughs": (LAUGHS, "more than 50000 keys"),
    "long alias": ("a: &a " + "x" * 100_000 + "\nb: [" + "*a," * 1000 + "]", "more than 4194304 characters"),
    "circle": ("a: &a [*a]", "the alias *'a' refers to no anchor before it, or to an enclosing one"),
    "unknown alias": ("a: *b", "the alias *'b' refers to no anchor"),
    "alias as a key": ("a: &a b\n*a : c", "an alias cannot be a key"),
    "directives": ("".join(f"%TAG !a{n}! x\n" for n in range(50_000)) + "--- a", "more than 10 lines begin with %TAG"),
    "size": ("a: b\n" + "#" * (4 << 20), "at most 4194304 are read"),
    "merge": ("a: &a {b: c}\nd: {<<: *a}", "line 2: merge keys (<<) are not accepted"),
    "twice": ("a: 1\nb: 2\na: 3", "line 3: the key 'a' is there twice"),
    "list as a key": ("? [a]\n: b", "a key must be a scalar"),
    "tag": ("a: !!timestamp 2020-01-01", "the tag 'tag:yaml.org,2002:timestamp' is not accepted"),
    "object": ("a: !!python/object/apply:os.system [id]", "os.system' is not accepted"),
    "own tag": ("a: !x {}", "the tag '!x' is not accepted"),
    "two documents": ("a: b\n---\nc: d", "line 2: a second document begins"),
    "no end": ("a: [", "did not find expected node content"),
    "half a character": ('a: "\ud800"', "surrogates not allowed"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_document_over_a_limit_is_refused_with_the_value_and_the_limit(name: str):
    text, reason = HOSTILE[name]

    for read in (load, parse):
        with pytest.raises(InvalidYaml, match=re.escape(reason)):
            read(text)


def test_json_has_the_same_limit_of_nodes():
    check_size({"a": [1, {"b": 2}]}, YamlLimits(nodes=7))
    with pytest.raises(InvalidYaml, match="more than 6 keys"):
        check_size({"a": [1, {"b": 2}]}, YamlLimits(nodes=6))
