"""Documents as YAML: readable by people, and read back exactly as they were written."""

import re
from typing import Any

import yaml
from yaml.composer import Composer

try:
    from yaml import CSafeDumper as Dumper
    from yaml import CSafeLoader
except ImportError:  # a PyYAML without libyaml does the same, ten times slower
    from yaml import SafeDumper as Dumper  # type: ignore[assignment]  # one or the other
    from yaml import SafeLoader as Loader
else:

    class Loader(Composer, CSafeLoader):  # type: ignore[no-redef]  # one or the other
        """libyaml's parser under Python's composer.

        libyaml's own composer ends the process at a text of a hundred thousand brackets; this one raises
        RecursionError.
        """

        def __init__(self, stream: bytes) -> None:
            CSafeLoader.__init__(self, stream)
            Composer.__init__(self)


__all__ = ["Dumper", "Loader", "dump", "load", "plain"]

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters but for tab and newline."""


def plain(text: str) -> str:
    """The text, if a document can hold it. Raises ValueError for control characters other than newline and tab."""
    if CONTROL.search(text):
        raise ValueError("must not have control characters other than newline and tab")
    return text


def dump(data: dict[str, Any]) -> bytes:
    """The document that holds this data, in its order."""
    text: bytes = yaml.dump(data, Dumper=Dumper, sort_keys=False, allow_unicode=True, encoding="utf-8")
    return text


def load(text: bytes) -> Any:
    """What a document holds. A text edited by hand may make this raise nearly any error."""
    return yaml.load(text, Loader)  # noqa: S506 - it is a safe one
