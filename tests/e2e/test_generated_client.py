"""A Python client generated from the OpenAPI document, driving the running server."""

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from clients import generate
from tests.server import Server


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Generate the client package, importable while the tests of this module run."""
    folder = tmp_path_factory.mktemp("generated")
    generate.python(folder)
    sys.path.insert(0, str(folder))
    yield generate.PACKAGE
    sys.path.remove(str(folder))


def _jane(generated: str) -> Any:
    item = load(generated, "models").AddEntitiesJsonBody()
    item.additional_properties = {"id": "jane", "schema": "Person", "properties": {"name": ["Jane Doe"]}}
    return item


def load(generated: str, name: str) -> ModuleType:
    return importlib.import_module(f"{generated}.{name}")


def test_client_creates_a_tenant_a_key_a_grant_and_a_dataset(generated: str, server: Server):
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
        created = load(generated, "api.datasets.create_dataset").sync(
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
    assert [dataset.name for dataset in page.results] == [created.name] == ["gen_one"]
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


def test_client_gets_results_of_jobs_typed_by_operation(generated: str, server: Server):
    models = load(generated, "models")
    with load(generated, "client").AuthenticatedClient(base_url=server.url, token=server.admin_key) as admin:
        load(generated, "api.datasets.create_dataset").sync(client=admin, body=models.NewDataset(name="gen_jobs"))
        job = load(generated, "api.operations.flush_dataset").sync("gen_jobs", client=admin)
        cancelled = load(generated, "api.jobs.cancel_job").sync(job.id, client=admin)
        deleted = load(generated, "api.datasets.delete_dataset").sync(
            "gen_jobs", client=admin, confirm="gen_jobs", wait=30
        )

    assert (job.operation, job.result) == (models.Operation.FLUSH, None)
    assert cancelled.id == job.id
    assert isinstance(deleted.result, models.DeleteResult)


def test_client_reads_entities_and_statements_as_typed_models(generated: str, server: Server):
    models = load(generated, "models")
    with load(generated, "client").AuthenticatedClient(base_url=server.url, token=server.admin_key) as admin:
        load(generated, "api.datasets.create_dataset").sync(client=admin, body=models.NewDataset(name="gen_reads"))
        load(generated, "api.entities.add_entities").sync("gen_reads", client=admin, body=_jane(generated), origin="o")
        named = models.Comparison(field="prop:name", op=models.Op.STARTSWITH, value="Jane")
        nobody = models.Not(not_=models.AllOf(and_=[named]))

        jane = load(generated, "api.entities.get_entity").sync("gen_reads", "jane", client=admin)
        missing = load(generated, "api.entities.get_entity").sync("gen_reads", "john", client=admin)
        listed = load(generated, "api.entities.list_entities").sync("gen_reads", client=admin, schemata=["Person"])
        query = load(generated, "api.entities.query_entities").sync
        found = query("gen_reads", client=admin, body=models.EntityQuery(where=named, sort=["-prop:name"]))
        none = query("gen_reads", client=admin, body=models.EntityQuery(where=nobody))
        over_all = load(generated, "api.entities.query_datasets").sync(
            client=admin, body=models.DatasetsQuery(datasets=["gen_rea*"], where=named)
        )
        counted = load(generated, "api.entities.aggregate_entities").sync(
            "gen_reads",
            client=admin,
            body=models.EntityAggregate(metrics=["count", models.Max(max_="prop:name")], group_by=["schema"]),
        )
        adjacent = load(generated, "api.entities.list_adjacent").sync("gen_reads", "jane", client=admin)
        statements = load(generated, "api.statements.list_statements").sync("gen_reads", client=admin, prop=["name"])

    assert (jane.id, jane.schema, jane.properties["name"]) == ("jane", "Person", ["Jane Doe"])
    assert isinstance(missing, models.EntityNotFoundProblem)
    assert [page.results[0].caption for page in (listed, found, over_all)] == ["Jane Doe"] * 3
    assert (none.results, none.next_) == ([], None)
    (group,) = counted.results
    assert group.group["schema"] == "Person"
    assert (group.metrics["count"], group.metrics["max:prop:name"]) == (1, "Jane Doe")
    assert adjacent.results == []
    assert [(row.entity_id, row.value, row.origin) for row in statements.results] == [("jane", "Jane Doe", "o")]
