"""Requests to the routes of the OpenAPI document, filled in with things of one or of two tenants."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote

from httpx2 import Response

from tests.in_process_api import Caller
from tests.isolation.prepared_lake import MARK, Resources
from tests.isolation.routes import Route


@dataclass(frozen=True)
class Operation:
    """Where a route is, and what it takes and answers, as the OpenAPI document says."""

    method: str
    path: str
    success: frozenset[int]
    parameters: Mapping[str, tuple[str, ...]]
    """Names of parameters, by `path`, `query` and `header`."""

    @classmethod
    def of(cls, method: str, path: str, operation: dict[str, Any]) -> "Operation":
        found = [(one["in"], one["name"].lower()) for one in operation.get("parameters", ())]
        return cls(
            method.upper(),
            path,
            frozenset(int(status) for status in operation["responses"] if status < "300"),
            {place: tuple(name for where, name in found if where == place) for place in ("path", "query", "header")},
        )


def operations_in(document: dict[str, Any]) -> dict[str, Operation]:
    """Every route of an OpenAPI document, by its operationId."""
    return {
        operation["operationId"]: Operation.of(method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


@dataclass(frozen=True)
class UnsentRequest:
    """One request, before it is anybody's."""

    place: Operation
    path: Mapping[str, str]
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None

    @property
    def url(self) -> str:
        return self.place.path.format_map({name: quote(value, safe="") for name, value in self.path.items()})

    @property
    def sent(self) -> str:
        """Everything that the caller says, and so may be told again."""
        return " ".join([*self.path.values(), *self.query.values(), *self.headers.values(), str(self.body)])

    def by(self, caller: Caller) -> Response:
        return caller(self.place.method, self.url, dict(self.headers), params=dict(self.query), content=self.body)


def valid_request(route: Route, place: Operation, things: Resources) -> UnsentRequest:
    """The request that a route's line describes, with these things for what it names."""
    said = None if route.body is None else route.body.replace(b"{value}", things["value"].encode())
    body = said if route.json is None else json.dumps(fill_in(route.json, things)).encode()
    kind = "application/json" if route.json is not None else route.kind
    names = {name: route.path.get(name, f"{{{name}}}") for name in place.parameters["path"]}
    return UnsentRequest(
        place,
        fill_in(names, things),
        fill_in(dict(route.query), things),
        {} if kind is None else {"Content-Type": kind},
        body,
    )


def with_json(asked: UnsentRequest, body: Any, things: Resources) -> UnsentRequest:
    return replace(asked, body=json.dumps(fill_in(body, things)).encode(), headers={"Content-Type": "application/json"})


def fill_in(value: Any, things: Resources) -> Any:
    """A value whose texts have things in the place of their names in braces."""
    if isinstance(value, str):
        return value.format_map(things)
    if isinstance(value, dict):
        return {key: fill_in(one, things) for key, one in value.items()}
    return [fill_in(one, things) for one in value] if isinstance(value, list) else value


def leaks_in(answer: Response, asked: UnsentRequest | None, things: Resources) -> list[str]:
    """What of another's an answer tells, that the caller did not say itself."""
    told = answer.text + " ".join(f"{name}: {value}" for name, value in answer.headers.items())
    sent = "" if asked is None else asked.sent
    secrets = {value for name, value in things.items() if name in SECRET}
    found = [secret for secret in secrets if secret in told and secret not in sent]
    if told.count(MARK) > _count_echoes(told, asked):
        found.append(MARK)
    return found


SECRET = (
    "statement",
    "checksum",
    "file",
    "stage",
    "filled_stage",
    "upload",
    "filled_upload",
    "snapshot",
    "job",
    "over_job",
    "item",
    "taken_item",
    "dead_item",
    "item_token",
    "lock_token",
    "etag",
)
"""Ids and the like, which have no mark in them."""


def _count_echoes(told: str, asked: UnsentRequest | None) -> int:
    """How often the mark is told only because the caller said what it is part of."""
    if asked is None:
        return 0
    said = {*asked.path.values(), *asked.query.values(), *asked.headers.values()}
    said |= set(_strings_in(asked.body))
    said |= {part for text in said for part in text.split("/")}
    longest = sorted((text for text in said if MARK in text), key=len, reverse=True)
    count = 0
    for text in longest:
        for form in {text, quote(text, safe="")}:
            count += told.count(form) * form.count(MARK)
            told = told.replace(form, "")
    return count


def _strings_in(body: bytes | None) -> list[str]:
    try:
        value = json.loads(body or b"null")
    except ValueError:
        return []
    found: list[str] = []

    def walk(one: Any) -> None:
        if isinstance(one, str):
            found.append(one)
        for inner in one.values() if isinstance(one, dict) else one if isinstance(one, list) else ():
            walk(inner)

    walk(value)
    return found
