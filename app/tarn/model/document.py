"""YAML documents: dump, and load with limits on size, nesting and aliases.

`load` is the only YAML reader. It builds values from parser events without recursion, supports only the types of JSON,
runs in bounded time, and reads back exactly what `dump` wrote. An unquoted scalar is null, a boolean or a number only
where YAML 1.1 (PyYAML) and the core schema of YAML 1.2 agree on it and JSON could write it; everything else is a
string, and so are all keys.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

try:
    from yaml import CSafeDumper as Dumper
    from yaml import CSafeLoader as Parser
except ImportError:  # PyYAML without libyaml: same result, ten times slower
    from yaml import SafeDumper as Dumper  # type: ignore[assignment]  # one or the other
    from yaml import SafeLoader as Parser  # type: ignore[assignment]


__all__ = ["STORED", "Dumper", "InvalidYaml", "Parser", "YamlLimits", "check_size", "dump", "load", "plain"]

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters except tab and newline."""

NULLS = frozenset({"", "~", "null", "Null", "NULL"})
BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)")
FLOAT = re.compile(r"-?(?:0|[1-9][0-9]*)\.[0-9]+(?:[eE][-+][0-9]+)?")
MOST_INTEGER = (1 << 63) - 1
LONGEST_NUMBER = 40
"""Maximum characters of a number."""

TAG = "tag:yaml.org,2002:"
TAG_DIRECTIVE = re.compile(rb"^%TAG", re.MULTILINE)
MOST_TAG_DIRECTIVES = 10
"""The parser compares each directive with every other: quadratic time."""

LONGEST_SHOWN = 60
"""Characters of a scalar that an error message shows."""


@dataclass(frozen=True, slots=True)
class YamlLimits:
    """Maximum size of a document. Each alias counts as much as the value it refers to."""

    size: int = 4 << 20
    """Characters or bytes of the text."""
    nodes: int = 50_000
    """Keys, scalars, lists and mappings."""
    characters: int = 4 << 20
    """Characters of all scalars and keys."""
    scalar: int = 128 << 10
    """Characters of one scalar."""
    depth: int = 50


STORED = YamlLimits(size=64 << 20, nodes=500_000, characters=64 << 20, scalar=8 << 20)
"""Limits of documents that Tarn wrote: everything that a request may contain can be read back."""


class InvalidYaml(ValueError):
    """A text that is not valid YAML, or that exceeds a limit."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason if line is None else f"line {line}: {reason}")
        self.reason = reason
        self.line = line


def plain(text: str) -> str:
    """Return the text unchanged. Raises ValueError for control characters other than newline and tab."""
    if CONTROL.search(text):
        raise ValueError("must not have control characters other than newline and tab")
    return text


def dump(data: dict[str, Any]) -> bytes:
    """Return the data as a YAML document, keys in their order."""
    text: bytes = yaml.dump(data, Dumper=Dumper, sort_keys=False, allow_unicode=True, encoding="utf-8")
    return text


def load(text: bytes | str, limits: YamlLimits = YamlLimits()) -> Any:  # noqa: B008 - it is frozen
    """Return the value of a document; None if it is empty. Raises InvalidYaml."""
    if len(text) > limits.size:
        raise InvalidYaml(f"the document is {len(text)} long, at most {limits.size} are read")
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if len(TAG_DIRECTIVE.findall(raw)) > MOST_TAG_DIRECTIVES:
        raise InvalidYaml(f"more than {MOST_TAG_DIRECTIVES} lines begin with %TAG")
    builder = _Builder(limits)
    try:
        for event in _events(text):
            builder.take(event)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise InvalidYaml(str(error.problem or error.context), None if mark is None else mark.line + 1) from None
    except (yaml.YAMLError, UnicodeError) as error:
        raise InvalidYaml(" ".join(str(error).split())[:500]) from None
    return builder.value


def check_size(data: Any, limits: YamlLimits = YamlLimits()) -> None:  # noqa: B008 - it is frozen
    """Raise InvalidYaml if data from JSON has more nodes than a document may have."""
    count, waiting = 0, [data]
    while waiting:
        count += 1
        node = waiting.pop()
        if isinstance(node, dict):
            count += len(node)
            waiting.extend(node.values())
        elif isinstance(node, list):
            waiting.extend(node)
        if count + len(waiting) > limits.nodes:
            raise InvalidYaml(_too_many(limits.nodes))


def _events(text: bytes | str) -> Iterator[yaml.Event]:
    parser = Parser(text)
    try:
        while (event := parser.get_event()) is not None:
            yield event
    finally:
        parser.dispose()


@dataclass(slots=True)
class _Open:
    """A list or mapping that is still open."""

    value: Any
    anchor: str | None
    nodes: int
    characters: int
    """Counts of nodes and characters before it."""
    key: str | None = None


@dataclass(slots=True)
class _Builder:
    """Builds the value from parser events and enforces the limits."""

    limits: YamlLimits
    value: Any = None
    _documents: int = 0
    _nodes: int = 0
    _characters: int = 0
    _open: list[_Open] = field(default_factory=list)
    _anchors: dict[str, tuple[Any, int, int]] = field(default_factory=dict)
    """The value of each anchor, and its counts of nodes and characters."""

    def take(self, event: yaml.Event) -> None:
        if isinstance(event, yaml.ScalarEvent):
            self._scalar(event)
        elif isinstance(event, yaml.SequenceStartEvent | yaml.MappingStartEvent):
            self._begin(event)
        elif isinstance(event, yaml.SequenceEndEvent | yaml.MappingEndEvent):
            closed = self._open.pop()
            if closed.anchor is not None:
                counts = self._nodes - closed.nodes, self._characters - closed.characters
                self._anchors[closed.anchor] = (closed.value, *counts)
        elif isinstance(event, yaml.AliasEvent):
            self._alias(event)
        elif isinstance(event, yaml.DocumentStartEvent):
            self._documents += 1
            if self._documents > 1:
                raise _at(event, "a second document begins, only one is read")

    def _scalar(self, event: yaml.ScalarEvent) -> None:
        text = event.value
        if len(text) > self.limits.scalar:
            raise _at(event, f"a scalar is {len(text)} characters long, at most {self.limits.scalar} are read")
        if event.tag not in (None, "!", f"{TAG}str"):
            raise _at(event, f"the tag {_shown(event.tag)} is not accepted")
        before = self._nodes, self._characters
        self._count(event, 1, len(text))
        is_plain = event.tag is None and event.implicit[0]
        if self._is_key():
            self._key(event, text, is_plain)
            value: Any = text
        else:
            value = _resolved(event, text) if is_plain else text
            self._put(value)
        if event.anchor is not None:
            self._anchors[event.anchor] = value, self._nodes - before[0], self._characters - before[1]

    def _begin(self, event: yaml.CollectionStartEvent) -> None:
        is_list = isinstance(event, yaml.SequenceStartEvent)
        if event.tag not in (None, "!", f"{TAG}{'seq' if is_list else 'map'}"):
            raise _at(event, f"the tag {_shown(event.tag)} is not accepted")
        if self._is_key():
            raise _at(event, "a key must be a scalar")
        if len(self._open) >= self.limits.depth:
            raise _at(event, f"it is nested more than {self.limits.depth} deep")
        collection = _Open([] if is_list else {}, event.anchor, self._nodes, self._characters)
        self._count(event, 1, 0)
        self._put(collection.value)
        self._open.append(collection)

    def _alias(self, event: yaml.AliasEvent) -> None:
        if self._is_key():
            raise _at(event, "an alias cannot be a key")
        anchored = self._anchors.get(event.anchor or "")
        if anchored is None:
            raise _at(event, f"the alias *{_shown(event.anchor)} refers to no anchor before it, or to an enclosing one")
        value, nodes, characters = anchored
        self._count(event, nodes, characters)
        self._put(value)

    def _is_key(self) -> bool:
        return bool(self._open) and isinstance(self._open[-1].value, dict) and self._open[-1].key is None

    def _key(self, event: yaml.Event, text: str, is_plain: bool) -> None:
        parent = self._open[-1]
        if is_plain and text == "<<":
            raise _at(event, "merge keys (<<) are not accepted: repeat the fields, or quote the key")
        if text in parent.value:
            raise _at(event, f"the key {_shown(text)} is there twice")
        parent.key = text

    def _put(self, value: Any) -> None:
        if not self._open:
            self.value = value
            return
        parent = self._open[-1]
        if parent.key is None:
            parent.value.append(value)
        else:
            parent.value[parent.key] = value
            parent.key = None

    def _count(self, event: yaml.Event, nodes: int, characters: int) -> None:
        self._nodes += nodes
        self._characters += characters
        if self._nodes > self.limits.nodes:
            raise _at(event, _too_many(self.limits.nodes))
        if self._characters > self.limits.characters:
            most = self.limits.characters
            raise _at(event, f"it has more than {most} characters, with what aliases stand for counted each time")


def _resolved(event: yaml.Event, text: str) -> Any:
    """Return the value of a scalar without quotes and tag."""
    if text in NULLS:
        return None
    if text in BOOLEANS:
        return BOOLEANS[text]
    if text[0] not in "-0123456789":
        return text
    if INTEGER.fullmatch(text):
        if len(text) > LONGEST_NUMBER or abs(int(text)) > MOST_INTEGER:
            raise _at(event, f"the integer {_shown(text)} has more than 64 bits: quote it if it is a text")
        return int(text)
    if FLOAT.fullmatch(text):
        if len(text) > LONGEST_NUMBER or not math.isfinite(value := float(text)):
            raise _at(event, f"the number {_shown(text)} cannot be held exactly: quote it if it is a text")
        return value
    return text


def _shown(text: str | None) -> str:
    text = text or ""
    return repr(text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + "…")


def _too_many(most: int) -> str:
    return f"it has more than {most} keys, values and lists, with what aliases stand for counted each time"


def _at(event: yaml.Event, reason: str) -> InvalidYaml:
    return InvalidYaml(reason, None if event.start_mark is None else event.start_mark.line + 1)
