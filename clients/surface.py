"""Detect breaking changes: list what an OpenAPI document promises to clients and requires of them, one per line.

A later version may promise more and require less. A removed promise breaks clients that relied on it, and a new
requirement (a *demand*) breaks clients that do not meet it. Names of operations and schemata are promises too, because
generated clients use them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

COMPONENT = "#/components/schemas/"
DEMAND = "! "
"""Prefix of demands in a text that has promises and demands."""


@dataclass(frozen=True)
class Surface:
    """The promises and demands of one version of the API."""

    promises: frozenset[str]
    demands: frozenset[str]

    def broken_by(self, later: "Surface") -> set[str]:
        """Return promises that a later version removes, and demands that it adds to existing routes and schemata."""
        return {*(self.promises - later.promises), *filter(self._is_of, later.demands - self.demands)}

    def _is_of(self, demand: str) -> bool:
        """Return whether a demand is on a promised route, schema or property; on a new one it breaks no client."""
        route_or_property, null, _ = demand.partition("may be null")
        beginning = route_or_property if null else demand.partition("needs ")[0]
        return any(promise.startswith(beginning) for promise in self.promises)

    def text(self) -> str:
        lines = [*self.promises, *(DEMAND + demand for demand in self.demands)]
        return "".join(f"{line}\n" for line in sorted(lines))

    @classmethod
    def parse(cls, text: str) -> "Surface":
        lines = text.splitlines()
        demands = frozenset(line.removeprefix(DEMAND) for line in lines if line.startswith(DEMAND))
        return cls(frozenset(line for line in lines if not line.startswith(DEMAND)), demands)


def surface(document: Json) -> Surface:
    """Return the surface of an OpenAPI document."""
    collector = _Collector(document.get("components", {}).get("schemas", {}))
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            collector.operation(f"{method.upper()} {path}", operation)
    return Surface(frozenset(collector.promises), frozenset(collector.demands))


class _Collector:
    """Collects promises and demands; visits each schema once as sent and once as received."""

    def __init__(self, schemata: dict[str, Json]) -> None:
        self._schemata = schemata
        self._sent: set[str] = set()
        self._received: set[str] = set()
        self.promises: set[str] = set()
        self.demands: set[str] = set()

    def operation(self, name: str, operation: Json) -> None:
        self.promises.add(f"{name} is {operation['operationId']}")
        for parameter in operation.get("parameters", ()):
            what = f"{parameter['in']} {parameter['name']}"
            self._takes(f"{name} takes {what}", parameter["schema"])
            if parameter.get("required"):
                self.demands.add(f"{name} needs {what}")
        body = operation.get("requestBody", {})
        for kind, content in body.get("content", {}).items():
            self._takes(f"{name} takes {kind}", content.get("schema", {}))
        if body.get("required"):
            self.demands.add(f"{name} needs a body")
        for status, response in operation["responses"].items():
            self.promises.add(f"{name} answers {status}")
            for kind, content in response.get("content", {}).items():
                schema = content.get("schema", {})
                if status < "400":
                    self._gives(f"{name} answers {status} {kind}", schema)
                # The problems of a status may change; the properties of each problem may not.
                for form in _alternatives(schema):
                    self._members(form, self._received, self._shows)

    def _takes(self, what: str, schema: Json) -> None:
        """Record what clients may send here: each accepted alternative and each value of an enum is a promise."""
        for form in _alternatives(schema):
            self.promises.add(f"{what}: {_name(form)}")
            self.promises.update(f"{what}: {value!r}" for value in form.get("enum", ()))
            for inner in _inner(form):
                self._takes(f"{what} item", inner)
            self._members(form, self._sent, self._sends)

    def _sends(self, owner: str, schema: Json) -> None:
        for prop, inner in schema.get("properties", {}).items():
            self._takes(f"{owner} takes {prop}", inner)
        self.demands.update(f"{owner} needs {prop}" for prop in schema.get("required", ()))
        self.promises.update(f"{owner} takes {value!r}" for value in schema.get("enum", ()))

    def _gives(self, what: str, schema: Json) -> None:
        """Record what clients receive here: each alternative is a promise; that it may be null is a demand."""
        for form in _alternatives(schema):
            if form.get("type") == "null":
                self.demands.add(f"{what}: may be null")
                continue
            self.promises.add(f"{what}: {_name(form)}")
            for inner in _inner(form):
                self._gives(f"{what} item", inner)
            self._members(form, self._received, self._shows)

    def _shows(self, owner: str, schema: Json) -> None:
        for prop, inner in schema.get("properties", {}).items():
            self._gives(f"{owner} has {prop}", inner)
        self.promises.update(f"{owner} always has {prop}" for prop in schema.get("required", ()))

    def _members(self, form: Json, seen: set[str], visit: Any) -> None:
        """Visit a named schema, once."""
        name = _name(form)
        if "$ref" not in form or name in seen:
            return
        seen.add(name)
        schema = self._schemata[name]
        visit(name, schema)
        for alternative in _alternatives(schema):
            if "$ref" in alternative:
                self._members(alternative, seen, visit)


def _alternatives(schema: Json) -> Iterator[Json]:
    """Yield the alternatives of a schema, or the schema itself."""
    alternatives = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
    if alternatives is None:
        yield schema
        return
    for alternative in alternatives:
        yield from _alternatives(alternative)


def _inner(form: Json) -> Iterator[Json]:
    """Yield the schemata of the items of an array or the values of a map."""
    yield from (form[inner] for inner in ("items", "additionalProperties") if isinstance(form.get(inner), dict))


def _name(form: Json) -> str:
    if "$ref" in form:
        return str(form["$ref"]).removeprefix(COMPONENT)
    if "const" in form:
        return repr(form["const"])
    kind, detail = form.get("type", "any"), form.get("format") or form.get("contentMediaType")
    return f"{kind} ({detail})" if detail else str(kind)
