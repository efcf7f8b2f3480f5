"""A Python client generated from the OpenAPI document, driving the running server."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from app.journal.formats import ENTITY_TYPES, STATEMENT_TYPES
from tests.server import Server


@pytest.fixture(scope="module")
def generated(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The generated package, importable while the tests of this module run."""
    folder = tmp_path_factory.mktemp("generated")
    (folder / "openapi.json").write_text(server.client().get("/openapi.json").text)
    streams = [kind for kind in {*ENTITY_TYPES, *STATEMENT_TYPES} if kind != "application/json"]
    config = {
        "package_name_override": "tarn_generated",
        "post_hooks": [],
        "content_type_overrides": dict.fromkeys(streams, "application/octet-stream"),
    }
    (folder / "config.yml").write_text(json.dumps(config))
    command = ["generate", "--path", "openapi.json", "--config", "config.yml", "--meta", "none", "--fail-on-warning"]
    result = subprocess.run(
        [Path(sys.executable).parent / "openapi-python-client", *command],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    sys.path.insert(0, str(folder))
    yield "tarn_generated"
    sys.path.remove(str(folder))


def _jane(generated: str) -> Any:
    item = load(generated, "models").AddEntitiesJsonBody()
    item.additional_properties = {"id": "jane", "schema": "Person", "properties": {"name": ["Jane Doe"]}}
    return item


def load(generated: str, name: str) -> ModuleType:
    return importlib.import_module(f"{generated}.{name}")


def test_client_makes_a_tenant_a_key_a_grant_and_a_dataset(generated: str, server: Server):
    models = load(generated, "models")
    client_type = load(generated, "client").AuthenticatedClient
    with client_type(base_url=server.url, token=server.admin_key) as admin:
        tenant = load(generated, "api.admin.create_tenant").sync(
            client=admin, body=models.NewTenant(name="generated", title="Generated")
        )
        key = load(generated, "api.admin.create_key").sync(
            "generated", client=admin, body=models.NewKey(label="client")
        )
        grant = load(generated, "api.admin.create_grant").sync(
            "generated", client=admin, body=models.NewGrant(dataset="gen_*", level=models.Level.ADMIN)
        )
    with client_type(base_url=server.url, token=key.key) as tenant_client:
        made = load(generated, "api.datasets.create_dataset").sync(
            client=tenant_client, body=models.NewDataset(name="gen_one", title="One")
        )
        page = load(generated, "api.datasets.list_datasets").sync(client=tenant_client)
        who = load(generated, "api.system.whoami").sync(client=tenant_client)
        written = load(generated, "api.entities.add_entities").sync(
            "gen_one", client=tenant_client, body=_jane(generated), origin="client"
        )
        catalog = load(generated, "api.catalog.get_catalog").sync(client=tenant_client)

    assert tenant.name == "generated"
    assert (grant.dataset, grant.level) == ("gen_*", models.Level.ADMIN)
    assert [dataset.name for dataset in page.results] == [made.name] == ["gen_one"]
    assert who.tenant == "generated"
    assert (written.entities, written.statements) == (1, 2)
    assert [dataset.title for dataset in catalog.datasets] == ["One"]


def test_client_gets_typed_problems(generated: str, server: Server):
    models = load(generated, "models")
    with load(generated, "client").AuthenticatedClient(base_url=server.url, token=server.admin_key) as admin:
        missing = load(generated, "api.datasets.get_dataset").sync("nothing", client=admin)
        invalid = load(generated, "api.datasets.create_dataset").sync(
            client=admin, body=models.NewDataset(name="Not Valid")
        )
    with load(generated, "client").AuthenticatedClient(base_url=server.url, token="wrong") as stranger:
        refused = load(generated, "api.system.whoami").sync(client=stranger)

    assert isinstance(missing, models.DatasetNotFoundProblem)
    assert missing.status == 404
    assert isinstance(invalid, models.SchemaViolationProblem)
    assert invalid.errors[0].field == "name"
    assert isinstance(refused, models.UnauthenticatedProblem)
