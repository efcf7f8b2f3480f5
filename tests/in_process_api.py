"""The API in this process and its callers: HTTP requests without a server."""

from dataclasses import replace
from types import TracebackType
from typing import Any

import pytest
from httpx2 import Response
from starlette.testclient import TestClient
from tarn.api.application import create_app
from tarn.api.http.services.container import Services

ONE_DATABASE = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
"""Runs a test on SQLite only, because its subject does not depend on the database."""


NOTHING_LEFT_OUT = {
    "errors": [],
    "omitted": {"count": 0, "by_property": {}, "first": []},
    "ignored": {},
    "nested": 0,
    "deleted": 0,
}
"""The response to a write that stored everything as it was sent."""


class Caller:
    """A client with one key."""

    def __init__(self, client: TestClient, key: str | None) -> None:
        self._client = client
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.key = key

    def __call__(self, method: str, path: str, headers: dict[str, Any] | None = None, **options: Any) -> Response:
        return self._client.request(method, path, headers=self._headers | (headers or {}), **options)

    def get(self, path: str, **options: Any) -> Response:
        return self("GET", path, **options)

    def head(self, path: str, **options: Any) -> Response:
        return self("HEAD", path, **options)

    def post(self, path: str, json: Any = None, **options: Any) -> Response:
        return self("POST", path, **({"json": json} if json is not None else {}), **options)

    def put(self, path: str, json: Any = None, **options: Any) -> Response:
        return self("PUT", path, **({"json": json} if json is not None else {}), **options)

    def patch(self, path: str, json: Any = None, **options: Any) -> Response:
        return self("PATCH", path, **({"json": json} if json is not None else {}), **options)

    def delete(self, path: str, **options: Any) -> Response:
        return self("DELETE", path, **options)


class InProcessApi:
    """The application around real services, with clients of its administrator and of the tenants that a test
    creates.
    """

    def __init__(self, services: Services, admin_key: str, owns_parsers: bool = True) -> None:
        self.services = services
        self._owns_parsers = owns_parsers
        self._client = TestClient(create_app(services), raise_server_exceptions=False)
        self.admin = Caller(self._client, admin_key)
        self.anonymous = Caller(self._client, None)

    def __enter__(self) -> "InProcessApi":
        self._client.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.__exit__(kind, error, trace)
        if self._owns_parsers:
            self.services.parsers.close()
        self.services.writer.close()
        self.services.reader.close()
        self.services.denials.close()

    def with_settings(self, **changes: Any) -> "InProcessApi":
        """Return the same API with other settings."""
        settings = self.services.settings.model_copy(update=changes)
        return InProcessApi(replace(self.services, settings=settings), str(self.admin.key), self._owns_parsers)

    def with_key(self, key: str) -> Caller:
        return Caller(self._client, key)

    def tenant(self, name: str, **grants: str) -> Caller:
        """Create a tenant with a grant for each `dataset=level`, where `any` means `*`; return a caller with its
        key.
        """
        assert self.admin.post("/v1/admin/tenants", {"name": name}).status_code == 201
        for dataset, level in grants.items():
            grant = {"dataset": "*" if dataset == "any" else dataset, "level": level}
            assert self.admin.post(f"/v1/admin/tenants/{name}/grants", grant).status_code == 201
        return self.with_key(self.admin.post(f"/v1/admin/tenants/{name}/keys", {}).json()["key"])

    def dataset(self, name: str, **metadata: Any) -> dict[str, Any]:
        response = self.admin.post("/v1/datasets", {"name": name, **metadata})
        assert response.status_code == 201, response.text
        created: dict[str, Any] = response.json()
        return created
