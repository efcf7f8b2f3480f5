"""What is chosen where the statements of an entity leave a choice, independent of their order."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import orjson
from rigour.langs import LangStr
from rigour.names.pick import pick_lang_name

from tarn.query.ftm_model import schema_conflict_reason

MAX_CHARACTERS = 10_000
"""Of the names that one caption is chosen from.

FtM compares each with each, character by character, and nothing else runs meanwhile: some milliseconds for these, hours
for a hundred thousand names. If there are more, the shortest are compared that are no more than this together.
"""


class CaptionCandidate(NamedTuple):
    """A statement that a caption may come from. The same fact said by two origins is one statement to FtM."""

    id: bytes
    value: str
    lang: str | None


def choose_caption(said: Sequence[CaptionCandidate], names: bool) -> str:
    """The caption that FtM would choose from the statements of one property, which hold names or not."""
    distinct = {one.id: one for one in said}.values()
    if names and len(distinct) > 1:
        values = _limited_names([(one.value, one.lang or "") for one in distinct])
        picked = pick_lang_name([LangStr(value, lang=lang or None) for value, lang in values])
        if picked is not None:
            return picked
    return min(distinct).value


def _limited_names(names: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The names that are compared, in their order."""
    if sum(len(value) for value, _ in names) > MAX_CHARACTERS:
        names.sort(key=lambda name: (len(name[0]), name))
        lengths = accumulate(len(value) for value, _ in names)
        names = [name for name, length in zip(names, lengths, strict=True) if length <= MAX_CHARACTERS]
    return sorted(names)


def invalid_line(canonical_id: str, schemata: Iterable[str]) -> bytes:
    """The report in the place of an entity whose schemata have nothing in common."""
    names = sorted(schemata)
    report = {"$invalid": {"id": canonical_id, "reason": schema_conflict_reason(names), "schemata": names}}
    return orjson.dumps(report, option=orjson.OPT_APPEND_NEWLINE)
