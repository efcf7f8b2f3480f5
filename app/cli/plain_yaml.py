"""YAML in the types of JSON and no others, which makes every JSON document plain YAML.

YAML 1.1 would take Norway's `no` for false, a date for an object, `010` for 8 and `12:30` for a number of seconds.
"""

import re
from typing import Any, ClassVar

import yaml


class PlainLoader(yaml.SafeLoader):
    """Takes for null, booleans and numbers what JSON does; everything else without quotes is a string."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}


_DIGITS = list("-0123456789")
_INTEGER = r"-?(?:0|[1-9][0-9]*)"
PlainLoader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"(?:null|~|)$"), ["n", "~", ""])
PlainLoader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"(?:true|false)$"), ["t", "f"])
PlainLoader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(_INTEGER + "$"), _DIGITS)
PlainLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(_INTEGER + r"(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?$"), _DIGITS
)


def parse(text: str) -> Any:
    """The value that a text stands for. Raises ValueError, in one line, for what is not YAML."""
    try:
        return yaml.load(text, PlainLoader)  # noqa: S506 - a SafeLoader with fewer types
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
