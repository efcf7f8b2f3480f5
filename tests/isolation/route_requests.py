"""Requests to the routes of the OpenAPI document, with the ids of resources of one or two tenants."""

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
    """A route as the OpenAPI document describes it: its location, parameters and successful statuses."""

    method: str
    path: str
    success: frozenset[int]
    parameters: Mapping[str, tuple[str, ...]]
    """Names of parameters, by `path`, `query` and `header`."""

    @classmethod
    def from_openapi(cls, method: str, path: str, description: dict[str, Any]) -> "Operation":
        parameters = [(one["in"], one["name"].lower()) for one in description.get("parameters", ())]
        return cls(
            method.upper(),
            path,
            frozenset(int(status) for status in description["responses"] if status < "300"),
            {
                location: tuple(name for parameter_location, name in parameters if parameter_location == location)
                for location in ("path", "query", "header")
            },
        )


def operations_in(document: dict[str, Any]) -> dict[str, Operation]:
    """Return every route of an OpenAPI document by its operationId."""
    return {
        description["operationId"]: Operation.from_openapi(method, path, description)
        for path, methods in document["paths"].items()
        for method, description in methods.items()
    }


@dataclass(frozen=True)
class UnsentRequest:
    """A request without a caller."""

    operation: Operation
    path: Mapping[str, str]
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None

    @property
    def url(self) -> str:
        return self.operation.path.format_map({name: quote(value, safe="") for name, value in self.path.items()})

    @property
    def sent_text(self) -> str:
        """Return all text that the caller sends, which the response may therefore contain."""
        return " ".join([*self.path.values(), *self.query.values(), *self.headers.values(), str(self.body)])

    def send(self, caller: Caller) -> Response:
        return caller(self.operation.method, self.url, dict(self.headers), params=dict(self.query), content=self.body)


def valid_request(route: Route, operation: Operation, resources: Resources) -> UnsentRequest:
    """Return the request that a route's line describes, with the ids of these resources."""
    body_template = None if route.body is None else route.body.replace(b"{value}", resources["value"].encode())
    body = body_template if route.json is None else json.dumps(fill_in(route.json, resources)).encode()
    content_type = "application/json" if route.json is not None else route.content_type
    names = {name: route.path.get(name, f"{{{name}}}") for name in operation.parameters["path"]}
    return UnsentRequest(
        operation,
        fill_in(names, resources),
        fill_in(dict(route.query), resources),
        {} if content_type is None else {"Content-Type": content_type},
        body,
    )


def with_json(request: UnsentRequest, body: Any, resources: Resources) -> UnsentRequest:
    return replace(
        request, body=json.dumps(fill_in(body, resources)).encode(), headers={"Content-Type": "application/json"}
    )


def fill_in(value: Any, resources: Resources) -> Any:
    """Return a value with the names in braces of all its strings replaced by the ids of these resources."""
    if isinstance(value, str):
        return value.format_map(resources)
    if isinstance(value, dict):
        return {key: fill_in(one, resources) for key, one in value.items()}
    return [fill_in(one, resources) for one in value] if isinstance(value, list) else value


def leaks_in(response: Response, request: UnsentRequest | None, resources: Resources) -> list[str]:
    """Return the strings of another tenant that a response reveals and the caller did not send itself."""
    text = response.text + " ".join(f"{name}: {value}" for name, value in response.headers.items())
    sent = "" if request is None else request.sent_text
    secrets = {value for name, value in resources.items() if name in UNMARKED_RESOURCES}
    leaked = [secret for secret in secrets if secret in text and secret not in sent]
    if text.count(MARK) > _count_echoes(text, request):
        leaked.append(MARK)
    return leaked


UNMARKED_RESOURCES = (
    "statement",
    "checksum",
    "file",
    "stage",
    "filled_stage",
    "upload",
    "filled_upload",
    "snapshot",
    "job",
    "cancelled_job",
    "item",
    "popped_item",
    "dead_item",
    "item_token",
    "lock_token",
    "etag",
)
"""Resources whose ids do not contain the mark."""


def _count_echoes(text: str, request: UnsentRequest | None) -> int:
    """Count how often a response contains the mark only because the caller sent text that contains it."""
    if request is None:
        return 0
    sent_texts = {*request.path.values(), *request.query.values(), *request.headers.values()}
    sent_texts |= set(_strings_in(request.body))
    sent_texts |= {part for sent in sent_texts for part in sent.split("/")}
    longest = sorted((sent for sent in sent_texts if MARK in sent), key=len, reverse=True)
    count = 0
    for sent in longest:
        for form in {sent, quote(sent, safe="")}:
            count += text.count(form) * form.count(MARK)
            text = text.replace(form, "")
    return count


def _strings_in(body: bytes | None) -> list[str]:
    try:
        value = json.loads(body or b"null")
    except ValueError:
        return []
    strings: list[str] = []

    def walk(one: Any) -> None:
        if isinstance(one, str):
            strings.append(one)
        for inner in one.values() if isinstance(one, dict) else one if isinstance(one, list) else ():
            walk(inner)

    walk(value)
    return strings
