"""Entity captions and `$invalid` reports, independent of the order of an entity's statements."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import orjson
from rigour.langs import LangStr
from rigour.names.pick import pick_lang_name

from tarn.query.output.ftm_model import schema_conflict_reason

MAX_CHARACTERS = 10_000
"""Total length of the names that one caption is chosen from.

FtM compares every pair, character by character, while holding the GIL: milliseconds for this many characters, hours for
a hundred thousand names. If there are more, only the shortest names that fit within this limit are compared.
"""


class CaptionCandidate(NamedTuple):
    """A statement that a caption may be taken from. The same fact from two origins is one statement to FtM."""

    id: bytes
    value: str
    lang: str | None


def choose_caption(candidates: Sequence[CaptionCandidate], names: bool) -> str:
    """Return the caption that FtM would choose from the statements of one property.

    `names` tells whether the property's type is `name`.
    """
    distinct = {statement.id: statement for statement in candidates}.values()
    if names and len(distinct) > 1:
        values = _limited_names([(statement.value, statement.lang or "") for statement in distinct])
        picked = pick_lang_name([LangStr(value, lang=lang or None) for value, lang in values])
        if picked is not None:
            return picked
    return min(distinct).value


def _limited_names(names: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the names to compare, sorted, limited to MAX_CHARACTERS."""
    if sum(len(value) for value, _ in names) > MAX_CHARACTERS:
        names.sort(key=lambda name: (len(name[0]), name))
        lengths = accumulate(len(value) for value, _ in names)
        names = [name for name, length in zip(names, lengths, strict=True) if length <= MAX_CHARACTERS]
    return sorted(names)


def invalid_line(canonical_id: str, schemata: Iterable[str]) -> bytes:
    """Return the `$invalid` report that replaces an entity whose schemata have no common schema."""
    names = sorted(schemata)
    report = {"$invalid": {"id": canonical_id, "reason": schema_conflict_reason(names), "schemata": names}}
    return orjson.dumps(report, option=orjson.OPT_APPEND_NEWLINE)
