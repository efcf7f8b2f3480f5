"""Every step from one revision to the next, on both databases, with rows in every table that there is."""

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
from tarn.model.job import VerifyOptions
from tarn.model.snapshot import Snapshot

from tests.conftest import copied_postgresql
from tests.in_process_api import InProcessApi
from tests.upgrade.rows import Rows, fill, read
from tests.upgrade.schema import Contraction, TableDescription, contractions, describe_schema, reflected

FIRST_RELEASED = "0012"
"""From here on, no step takes anything from the version before: nobody ran those before it side by side."""

SCRIPTS = [*ScriptDirectory.from_config(migrate.alembic_config()).walk_revisions()][::-1]

JANE = {"id": "jane", "schema": "Person", "properties": {"name": ["Jane Doe"], "nationality": ["us"]}}


class Step(NamedTuple):
    """A revision, and what became of the rows of the one before it."""

    revision: str
    before: Rows
    after: Rows
    taken: list[Contraction]


class Climbed(NamedTuple):
    url: str
    steps: list[Step]


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def climbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Climbed]:
    """A database that came up step by step, and got rows in every table at each."""
    if request.param == "sqlite":
        yield migrate_step_by_step(f"sqlite:///{tmp_path_factory.mktemp('climbed')}/tarn.db")
        return
    with copied_postgresql(request.getfixturevalue("postgresql"), template="template0") as url:
        yield migrate_step_by_step(url)


def migrate_step_by_step(url: str) -> Climbed:
    database = Database(url)
    steps: list[Step] = []
    known: dict[str, TableDescription] = {}
    before: Rows = {}
    for turn, script in enumerate(SCRIPTS):
        with database.rebuild() as connection:
            config = migrate.alembic_config()
            config.attributes["connection"] = connection
            command.upgrade(config, script.revision)
            schema = reflected(connection)
            after, found = read(connection, schema, before), describe_schema(connection, schema)
            steps.append(Step(script.revision, before, after, contractions(known, found)))
            fill(connection, schema, turn)
            before, known = read(connection, schema), found
    database.close()
    return Climbed(url, steps)


@pytest.fixture
def database_url(climbed: Climbed, postgresql: str, tmp_path) -> Iterator[str]:
    """What the house of these tests stands on: a copy."""
    if climbed.url.startswith("sqlite"):
        copyfile(climbed.url.removeprefix("sqlite:///"), tmp_path / "tarn.db")
        yield f"sqlite:///{tmp_path}/tarn.db"
        return
    name = str(make_url(climbed.url).database)
    with copied_postgresql(postgresql, template=name) as url:
        yield url


def test_rows_of_every_table_survive_every_step_and_the_schema_is_the_one_that_a_new_database_gets(
    climbed: Climbed, tmp_path, request: pytest.FixtureRequest
):
    assert [step.revision for step in climbed.steps] == [script.revision for script in SCRIPTS]
    for step in climbed.steps[1:]:
        assert all(len(rows) > 1 for rows in step.before.values())
        assert step.after == step.before, step.revision
    database = Database(climbed.url)
    with database.read() as connection:
        migrated = describe_schema(connection)
    database.close()
    if climbed.url.startswith("sqlite"):
        assert migrated == new_schema(f"sqlite:///{tmp_path}/new.db")
    else:
        with copied_postgresql(request.getfixturevalue("postgresql"), template="template0") as url:
            assert migrated == new_schema(url)


def test_the_application_works_on_what_came_up_step_by_step(
    house: InProcessApi, dataset: Dataset, flush: Callable[[], list[Snapshot]]
):
    migrate.require_current(house.services.database)
    admin = house.admin
    written = admin.post(f"/v1/datasets/{dataset.name}/entities", [JANE])
    assert written.status_code in (200, 201), written.text
    assert admin.get(f"/v1/datasets/{dataset.name}/entities/jane").json()["properties"] == JANE["properties"]
    assert [snapshot.rows.live for snapshot in flush()] == [3]
    assert admin.get(f"/v1/datasets/{dataset.name}/entities/jane").json()["properties"] == JANE["properties"]

    listed = {path: admin.get(path) for path in ("/v1/jobs", "/v1/admin/tenants", "/v1/admin/audit", "/v1/datasets")}
    assert {path: answer.status_code for path, answer in listed.items()} == dict.fromkeys(listed, 200)
    assert any(job["id"].startswith("jobs-") for job in listed["/v1/jobs"].json()["results"])
    assert "tenants-1" in {tenant["name"] for tenant in listed["/v1/admin/tenants"].json()["results"]}
    assert admin.get("/v1/admin/worker").status_code == 200
    assert admin.get("/metrics").status_code == 200

    services = house.services
    looked = verify(
        services.database, services.store, services.settings, "tester", dataset, VerifyOptions(), lambda _: None
    )
    assert looked.findings == []


# What a step may not do


def test_no_step_takes_anything_from_the_version_before_unless_it_says_since_when_nobody_uses_it(climbed: Climbed):
    modules = {script.revision: script.module for script in SCRIPTS}
    for step in climbed.steps:
        if step.revision <= FIRST_RELEASED:
            continue
        allowed = getattr(modules[step.revision], "unused_since", {})
        assert [found for found in step.taken if found.of not in allowed] == [], (
            f"{step.revision} takes this from processes of the version before, which may still run: "
            "see docs/upgrades.md"
        )


def test_what_was_taken_before_there_was_a_rule_is_found(climbed: Climbed):
    """0005 has columns that may not be null, and took back the default that rows got: code of 0004 cannot write."""
    taken = {step.revision: step.taken for step in climbed.steps}
    assert Contraction("jobs.arguments", "is new, may not be null and has no default") in taken["0005"]
    assert taken["0006"] == []


@pytest.mark.parametrize(
    ("statement", "of", "what"),
    [
        ("DROP TABLE tags", "tags", "is gone, or has another name"),
        ("ALTER TABLE tags RENAME TO labels", "tags", "is gone, or has another name"),
        ("ALTER TABLE tags DROP COLUMN value", "tags.value", "is gone, or has another name"),
        ("ALTER TABLE tags RENAME COLUMN value TO worth", "tags.value", "is gone, or has another name"),
        ("ALTER TABLE tags ALTER COLUMN value SET NOT NULL", "tags.value", "may not be null any more"),
        ("ALTER TABLE tags ALTER COLUMN key TYPE varchar(10)", "tags.key", "was VARCHAR(255) and is VARCHAR(10)"),
        (
            "ALTER TABLE lake ADD COLUMN name text NOT NULL",
            "lake.name",
            "is new, may not be null and has no default",
        ),
        ("CREATE UNIQUE INDEX one ON workers (host)", "workers", "has to be unique: [\"('host',)\"]"),
        ("ALTER TABLE workers ADD CHECK (pid > 0)", "workers", "has to fulfil a condition: ['pid > 0']"),
        (
            "ALTER TABLE grants DROP CONSTRAINT uq_grants_tenant_dataset_level",
            "grants",
            "need not be unique any more: [('tenant', 'dataset', 'level')]",
        ),
    ],
)
def test_each_kind_of_contraction_is_found(postgresql: str, statement: str, of: str, what: str):
    with copied_postgresql(postgresql) as url:
        database = Database(url)
        with database.write() as connection:
            before = describe_schema(connection)
            connection.execute(text(statement))
            assert Contraction(of, what) in contractions(before, describe_schema(connection))
        database.close()


def test_adding_is_no_contraction(postgresql: str):
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


def test_revisions_are_numbers_in_their_order_and_say_whom_they_serve():
    revisions = [script.revision for script in SCRIPTS]
    assert revisions == sorted(revisions)
    assert all(len(each) == 4 and each.isdigit() for each in revisions)
    served = [said(script) for script in SCRIPTS if script.revision > FIRST_RELEASED]
    assert all(oldest in revisions for oldest in served)
    # What one step has ended no later one brings back.
    assert served == sorted(served)


def said(script: Any) -> str:
    assert hasattr(script.module, "compatible_from"), (
        f"{script.revision} must say `compatible_from`: the oldest revision whose code works on its database"
    )
    return str(script.module.compatible_from)


def new_schema(url: str) -> dict[str, TableDescription]:
    """The schema that the code has in mind."""
    database = Database(url)
    with database.write() as connection:
        metadata.create_all(connection)
    with database.read() as connection:
        found = describe_schema(connection)
    database.close()
    return found
