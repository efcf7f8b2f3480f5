"""Metadata options: fields of a file, overridden by `--set` assignments, overridden by dedicated options."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from tarn.cli.failures import Misuse

SERVERS_OWN = frozenset({"name", "id", "created"})
"""Fields of a dataset's document that only the server sets."""

Title = Annotated[str | None, typer.Option(help="Display title.")]
Summary = Annotated[str | None, typer.Option(help="Description in one sentence.")]
Description = Annotated[str | None, typer.Option(help="Full description.")]
File = Annotated[
    typer.FileText | None,
    typer.Option(
        "--file",
        metavar="FILE",
        encoding="utf-8",
        help="Fields from YAML or JSON, - for standard input. Fields that only the server sets (name, id, created) "
        "are ignored, so that a document from the server can be sent back.",
    ),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Set any field; repeatable. The value is parsed as JSON or YAML, an empty value is null, and dots address "
        "nested fields: --set publisher.name=Parliament --set 'tags=\\[money, power]'",
    ),
]


@dataclass(frozen=True)
class Metadata:
    """Fields to send: complete ones, and assignments to nested ones."""

    fields: dict[str, Any]
    assignments: list[tuple[list[str], Any]]

    def __bool__(self) -> bool:
        return bool(self.fields or self.assignments)

    @property
    def extends(self) -> set[str]:
        """Names of fields given only in part: their current value is needed to send them."""
        return {path[0] for path, _ in self.assignments if len(path) > 1} - self.fields.keys()

    def body(self, current: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the request body. A field given in part keeps the rest of its current value."""
        extended = {field: (current or {}).get(field) or {} for field in self.extends}
        body: dict[str, Any] = copy.deepcopy(extended | self.fields)
        for path, value in self.assignments:
            _assign(body, path, value)
        return body


def read_metadata(file: typer.FileText | None, assignments: Iterable[str] | None, **options: str | None) -> Metadata:
    """Return the metadata of the command line. Raises Misuse if it cannot be parsed."""
    parsed = [_assignment(text) for text in assignments or ()]
    parsed += [([field], value) for field, value in options.items() if value is not None]
    return Metadata({} if file is None else _fields(file), parsed)


def _fields(file: typer.FileText) -> dict[str, Any]:
    try:
        fields = _plain(file.read())
    except ValueError as error:
        raise Misuse(f"{file.name} cannot be read: {error}") from None
    if not isinstance(fields, dict) or not all(isinstance(field, str) for field in fields):
        raise Misuse(f"{file.name} must contain an object of fields and values")
    return {field: value for field, value in fields.items() if field not in SERVERS_OWN}


def _assignment(text: str) -> tuple[list[str], Any]:
    field, equals, value = text.partition("=")
    path = field.split(".")
    if not equals or not all(path):
        raise Misuse(f"--set {text!r} must look like field=value or field.nested=value")
    try:
        return path, _plain(value)
    except ValueError as error:
        raise Misuse(f"--set {text!r} cannot be read: {error}") from None


def _assign(body: dict[str, Any], path: list[str], value: Any) -> None:
    *parents, last = path
    for parent in parents:
        body = body.setdefault(parent, {})
        if not isinstance(body, dict):
            raise Misuse(f"--set {'.'.join(path)}: {parent} has no fields of its own")
    body[last] = value


def _plain(text: str) -> Any:
    from tarn.cli.input.yaml_reader import parse  # late import: only commands that set something need YAML

    return parse(text)
