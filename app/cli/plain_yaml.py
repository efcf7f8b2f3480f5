"""JSON, or YAML in the types of JSON and no others.

YAML 1.1 would take Norway's `no` for false, a date for an object, `010` for 8 and `12:30` for a number of seconds.
"""

import json
import re
from typing import Any

import yaml


class PlainLoader(yaml.SafeLoader):
    """Takes for null, booleans and numbers what JSON does; everything else without quotes is a string."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - as the base class declares it


_DIGITS = list("-0123456789")
_INTEGER = r"-?(?:0|[1-9][0-9]*)"
PlainLoader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"(?:null|~|)$"), ["n", "~", ""])
PlainLoader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"(?:true|false)$"), ["t", "f"])
PlainLoader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(_INTEGER + "$"), _DIGITS)
PlainLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(_INTEGER + r"(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?$"), _DIGITS
)


def parse(text: str) -> Any:
    """The value that a text stands for. Raises ValueError, in one line, for what is neither JSON nor YAML."""
    try:
        return json.loads(text, parse_constant=_refused)
    except ValueError:
        pass  # it may still be YAML; only almost all JSON is
    try:
        return yaml.load(text, PlainLoader)  # noqa: S506 - a SafeLoader with fewer types
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
