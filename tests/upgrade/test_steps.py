"""Every migration from one revision to the next, on both databases, with rows in every table."""

from collections.abc import Callable, Iterator
from shutil import copyfile
from typing import Any, NamedTuple

import pytest
from alembic import command
from alembic.script import ScriptDirectory
from sqlalchemy import make_url, text
from tarn.datasets.registry import Dataset
from tarn.db import migrate
from tarn.db.engine import Database
from tarn.db.tables import metadata
from tarn.integrity.verify import verify
from tarn.model.datasets.snapshot import Snapshot
from tarn.model.work.job import VerifyOptions

from tests.conftest import copied_postgresql
from tests.in_process_api import InProcessApi
from tests.upgrade.rows import Rows, fill, read
from tests.upgrade.schema import Contraction, TableDescription, contractions, describe_schema, reflect

pytestmark = pytest.mark.both_databases

FIRST_RELEASED = "0012"
"""Contractions are allowed up to this revision: versions before it never ran concurrently."""

SCRIPTS = [*ScriptDirectory.from_config(migrate.alembic_config()).walk_revisions()][::-1]

JANE = {"id": "jane", "schema": "Person", "properties": {"name": ["Jane Doe"], "nationality": ["us"]}}


class Step(NamedTuple):
    """A revision, the rows before and after its migration, and the contractions of the schema."""

    revision: str
    before: Rows
    after: Rows
    contractions: list[Contraction]


class MigratedDatabase(NamedTuple):
    """A database that was migrated one revision at a time, and the steps."""

    url: str
    steps: list[Step]


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def migrated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MigratedDatabase]:
    """Provide a database that was migrated step by step, with rows added to every table at each step."""
    if request.param == "sqlite":
        yield migrate_step_by_step(f"sqlite:///{tmp_path_factory.mktemp('migrated')}/tarn.db")
        return
    with copied_postgresql(request.getfixturevalue("postgresql"), template="template0") as url:
        yield migrate_step_by_step(url)


def migrate_step_by_step(url: str) -> MigratedDatabase:
    database = Database(url)
    steps: list[Step] = []
    known: dict[str, TableDescription] = {}
    before: Rows = {}
    for number, script in enumerate(SCRIPTS):
        with database.rebuild() as connection:
            config = migrate.alembic_config()
            config.attributes["connection"] = connection
            command.upgrade(config, script.revision)
            schema = reflect(connection)
            after, description = read(connection, schema, before), describe_schema(connection, schema)
            steps.append(Step(script.revision, before, after, contractions(known, description)))
            fill(connection, schema, number)
            before, known = read(connection, schema), description
    database.close()
    return MigratedDatabase(url, steps)


@pytest.fixture
def database_url(migrated: MigratedDatabase, postgresql: str, tmp_path) -> Iterator[str]:
    """Return the URL of a copy of the database, for the API."""
    if migrated.url.startswith("sqlite"):
        copyfile(migrated.url.removeprefix("sqlite:///"), tmp_path / "tarn.db")
        yield f"sqlite:///{tmp_path}/tarn.db"
        return
    name = str(make_url(migrated.url).database)
    with copied_postgresql(postgresql, template=name) as url:
        yield url


def test_every_step_keeps_all_rows_and_the_last_schema_is_that_of_a_new_database(
    migrated: MigratedDatabase, tmp_path, request: pytest.FixtureRequest
):
    assert [step.revision for step in migrated.steps] == [script.revision for script in SCRIPTS]
    for step in migrated.steps[1:]:
        assert all(len(rows) > 1 for rows in step.before.values())
        assert step.after == step.before, step.revision
    database = Database(migrated.url)
    with database.read() as connection:
        schema = describe_schema(connection)
    database.close()
    if migrated.url.startswith("sqlite"):
        assert schema == new_schema(f"sqlite:///{tmp_path}/new.db")
    else:
        with copied_postgresql(request.getfixturevalue("postgresql"), template="template0") as url:
            assert schema == new_schema(url)


def test_application_works_on_a_database_migrated_step_by_step(
    api: InProcessApi, dataset: Dataset, flush: Callable[[], list[Snapshot]]
):
    migrate.require_current(api.services.database)
    admin = api.admin
    response = admin.post(f"/v1/datasets/{dataset.name}/entities", [JANE])
    assert response.status_code in (200, 201), response.text
    assert admin.get(f"/v1/datasets/{dataset.name}/entities/jane").json()["properties"] == JANE["properties"]
    assert [snapshot.rows.live for snapshot in flush()] == [3]
    assert admin.get(f"/v1/datasets/{dataset.name}/entities/jane").json()["properties"] == JANE["properties"]

    responses = {path: admin.get(path) for path in ("/v1/jobs", "/v1/admin/tenants", "/v1/admin/audit", "/v1/datasets")}
    assert {path: response.status_code for path, response in responses.items()} == dict.fromkeys(responses, 200)
    assert any(job["id"].startswith("jobs-") for job in responses["/v1/jobs"].json()["results"])
    assert "tenants-1" in {tenant["name"] for tenant in responses["/v1/admin/tenants"].json()["results"]}
    assert admin.get("/v1/admin/worker").status_code == 200
    assert admin.get("/metrics").status_code == 200

    services = api.services
    report = verify(
        services.database, services.store, services.settings, "tester", dataset, VerifyOptions(), lambda _: None
    )
    assert report.findings == []


# Contractions


def test_no_step_contracts_the_schema_unless_it_declares_since_when_that_is_unused(migrated: MigratedDatabase):
    modules = {script.revision: script.module for script in SCRIPTS}
    for step in migrated.steps:
        if step.revision <= FIRST_RELEASED:
            continue
        allowed = getattr(modules[step.revision], "unused_since", {})
        assert [contraction for contraction in step.contractions if contraction.subject not in allowed] == [], (
            f"{step.revision} changes this for processes of the version before, which may still run: "
            "see docs/upgrades.md"
        )


def test_contraction_of_an_early_step_is_detected(migrated: MigratedDatabase):
    """Revision 0005 adds columns that are not nullable and have no default, so code for 0004 cannot insert rows."""
    by_revision = {step.revision: step.contractions for step in migrated.steps}
    assert Contraction("jobs.arguments", "is new, not nullable and without a default") in by_revision["0005"]
    assert by_revision["0006"] == []


@pytest.mark.parametrize(
    ("statement", "subject", "change"),
    [
        ("DROP TABLE tags", "tags", "was removed or renamed"),
        ("ALTER TABLE tags RENAME TO labels", "tags", "was removed or renamed"),
        ("ALTER TABLE tags DROP COLUMN value", "tags.value", "was removed or renamed"),
        ("ALTER TABLE tags RENAME COLUMN value TO worth", "tags.value", "was removed or renamed"),
        ("ALTER TABLE tags ALTER COLUMN value SET NOT NULL", "tags.value", "is no longer nullable"),
        ("ALTER TABLE tags ALTER COLUMN key TYPE varchar(10)", "tags.key", "was VARCHAR(255) and is VARCHAR(10)"),
        (
            "ALTER TABLE lake ADD COLUMN name text NOT NULL",
            "lake.name",
            "is new, not nullable and without a default",
        ),
        ("CREATE UNIQUE INDEX one ON workers (host)", "workers", "has a new unique constraint: [\"('host',)\"]"),
        ("ALTER TABLE workers ADD CHECK (pid > 0)", "workers", "has a new check constraint: ['pid > 0']"),
        (
            "ALTER TABLE grants DROP CONSTRAINT uq_grants_tenant_dataset_level",
            "grants",
            "lost a unique constraint: [('tenant', 'dataset', 'level')]",
        ),
    ],
)
def test_each_kind_of_contraction_is_detected(postgresql: str, statement: str, subject: str, change: str):
    with copied_postgresql(postgresql) as url:
        database = Database(url)
        with database.write() as connection:
            before = describe_schema(connection)
            connection.execute(text(statement))
            assert Contraction(subject, change) in contractions(before, describe_schema(connection))
        database.close()


def test_addition_is_not_a_contraction(postgresql: str):
    with copied_postgresql(postgresql) as url:
        database = Database(url)
        with database.write() as connection:
            before = describe_schema(connection)
            connection.execute(text("CREATE TABLE later (id integer PRIMARY KEY)"))
            connection.execute(text("ALTER TABLE tags ADD COLUMN more text"))
            connection.execute(text("ALTER TABLE tags ADD COLUMN most integer NOT NULL DEFAULT 0"))
            connection.execute(text("CREATE INDEX more ON tags (more)"))
            assert contractions(before, describe_schema(connection)) == []
        database.close()


def test_revisions_are_ascending_numbers_and_declare_their_oldest_compatible_version():
    revisions = [script.revision for script in SCRIPTS]
    assert revisions == sorted(revisions)
    assert all(len(each) == 4 and each.isdigit() for each in revisions)
    served = [compatible_from(script) for script in SCRIPTS if script.revision > FIRST_RELEASED]
    assert all(oldest in revisions for oldest in served)
    # A later step does not restore the compatibility that an earlier one ended.
    assert served == sorted(served)


def compatible_from(script: Any) -> str:
    assert hasattr(script.module, "compatible_from"), (
        f"{script.revision} must declare `compatible_from`: the oldest revision whose code works on its database"
    )
    return str(script.module.compatible_from)


def new_schema(url: str) -> dict[str, TableDescription]:
    """Return the schema that the code creates in an empty database."""
    database = Database(url)
    with database.write() as connection:
        metadata.create_all(connection)
    with database.read() as connection:
        schema = describe_schema(connection)
    database.close()
    return schema
