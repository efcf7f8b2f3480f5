"""Reads with the Python client: records, and tables of every supported library."""

import json
import subprocess
import sys
from collections.abc import Generator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import duckdb
import pytest
from tarn_client import Dataset, IncompleteResponse, InvalidEntitiesWarning, Lake, Problem
from tarn_client.records import Records

from tests.clients.conftest import person
from tests.clients.proxy import Cut, cutting_proxy
from tests.exporting import make_exports
from tests.server import Server

PEOPLE = 30
SDK = Path(__file__).parents[2] / "clients" / "python"


@pytest.fixture
def people(dataset: Dataset) -> Dataset:
    with dataset.writer("crawl") as writer:
        writer.add_all(person(number) for number in range(PEOPLE))
    return dataset


def as_dicts(records: Records) -> dict[str, list[str]]:
    """Return the ids of the records in every supported form."""
    with duckdb.connect() as connection:
        return {
            "records": [record["id"] for record in records],
            "arrow": records.arrow()["id"].to_pylist(),
            "pandas": records.pandas()["id"].to_list(),
            "polars": records.polars()["id"].to_list(),
            "duckdb": [id for (id,) in records.duckdb(connection).project("id").fetchall()],
        }


def test_entities_and_statements_are_the_same_in_every_form(people: Dataset):
    entities, statements = as_dicts(people.entities()), as_dicts(people.statements(prop="name"))

    assert set(map(len, entities.values())) == set(map(len, statements.values())) == {PEOPLE}
    assert all(ids == entities["records"] for ids in entities.values())
    assert all(ids == statements["records"] for ids in statements.values())


def test_tables_have_the_fields_and_values_of_records(people: Dataset):
    (entity,), (statement,) = people.entities(id="p00007"), people.statements(id="p00007", prop="name")
    (entity_row,) = people.entities(id="p00007").arrow().to_pylist(maps_as_pydicts="strict")
    (statement_row,) = people.statements(id="p00007", prop="name").arrow().to_pylist()

    def as_json(row: dict) -> dict:
        return json.loads(json.dumps(row, default=lambda timestamp: timestamp.isoformat().replace("+00:00", "Z")))

    assert entity_row.keys() == entity.keys()
    assert {key: entity_row[key] for key in ("id", "caption", "properties", "origin")} == {
        key: entity[key] for key in ("id", "caption", "properties", "origin")
    }
    assert as_json(statement_row).keys() == statement.keys()
    assert (statement_row["value"], statement_row["external"]) == (statement["value"], statement["external"])
    assert (entity_row["first_seen"], statement_row["first_seen"]) == (statement_row["last_seen"],) * 2


def test_conditions_order_and_limit_are_applied_by_the_server(people: Dataset):
    where = {"field": "prop:name", "op": "in", "value": ["Person 3", "Person 5", "Person 7"]}

    ids = [entity["id"] for entity in people.entities(where=where, schemata="LegalEntity", sort="-prop:name")]

    assert ids == ["p00007", "p00005", "p00003"]
    assert [entity["id"] for entity in people.entities(limit=2)] == ["p00000", "p00001"]
    assert list(people.entities(schema="Company")) == []
    assert people.entities(schema="Company").arrow().num_rows == 0


def test_missing_dataset_or_entity_raises_its_problem(lake: Lake, people: Dataset):
    with pytest.raises(Problem) as dataset:
        list(lake.dataset("nonsense").entities())
    with pytest.raises(Problem) as entity:
        people.entity("nobody")

    assert (dataset.value.slug, entity.value.slug) == ("dataset-not-found", "entity-not-found")
    assert people.snapshot() is None
    assert people.name in {listed.name for listed in lake.datasets()}


@pytest.mark.parametrize("form", ["records", "arrow"])
def test_truncated_stream_raises_incomplete_response(people: Dataset, server: Server, form: str):
    with cutting_proxy(server.url, [Cut(down=1500)]) as proxy, Lake(proxy.url, server.admin_key) as lake:
        statements = lake.dataset(people.name).statements()
        with pytest.raises(IncompleteResponse):
            list(statements if form == "records" else statements.batches())


@pytest.fixture
def conflicting(people: Dataset) -> Dataset:
    """Return people, two of whom are vessels according to another origin, and therefore invalid."""
    with people.writer("register") as writer:
        writer.add_all({"id": f"p{number:05}", "schema": "Vessel", "properties": {}} for number in (3, 7))
    return people


OMITTED = r"statements do not assemble: 2, the first is 'p00003' \(No common schema: Person, Vessel\)"


@pytest.mark.parametrize("query", [{}, {"sort": "id"}, {"where": {"field": "id", "op": "ne", "value": "x"}}])
def test_invalid_entities_are_omitted_with_a_warning(conflicting: Dataset, query: dict):
    entities = conflicting.entities(**query)

    with pytest.warns(InvalidEntitiesWarning, match=OMITTED) as warnings:
        ids = [entity["id"] for entity in entities]

    assert len(ids) == PEOPLE - 2
    assert {"p00003", "p00007"}.isdisjoint(ids)
    assert [one.filename for one in warnings] == [__file__]
    assert (entities.invalid_count, [one["id"] for one in entities.invalid]) == (2, ["p00003", "p00007"])


def test_table_of_entities_warns_of_omitted_invalid_entities(conflicting: Dataset):
    with pytest.warns(InvalidEntitiesWarning, match=OMITTED):
        assert conflicting.entities().arrow().num_rows == PEOPLE - 2


def test_reader_that_stops_early_is_warned_of_entities_omitted_so_far(conflicting: Dataset):
    iterator = iter(conflicting.entities())
    assert isinstance(iterator, Generator)
    before = [next(iterator)["id"] for _ in range(4)]

    with pytest.warns(InvalidEntitiesWarning, match="assemble: 1, the first is 'p00003'"):
        iterator.close()

    assert before == ["p00000", "p00001", "p00002", "p00004"]


def test_invalid_entities_beyond_the_maximum_list_are_counted(conflicting: Dataset, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tarn_client.records.MOST_INVALID", 1)
    entities = conflicting.entities()

    with pytest.warns(InvalidEntitiesWarning):
        list(entities)

    assert (entities.invalid_count, [one["id"] for one in entities.invalid]) == (2, ["p00003"])


def test_invalid_entities_are_read_with_the_schemata_of_each_origin(conflicting: Dataset, people: Dataset):
    invalid = list(conflicting.invalid_entities())

    assert [one["id"] for one in invalid] == ["p00003", "p00007"]
    assert invalid[0]["by_origin"] == [
        {"origin": "crawl", "schemata": ["Person"]},
        {"origin": "register", "schemata": ["Vessel"]},
    ]


def test_export_warns_of_invalid_entities_that_its_file_omits(
    conflicting: Dataset, server: Server, kernel_process: ProcessPoolExecutor, tmp_path: Path
):
    make_exports(server, conflicting.name, kernel_process)

    with pytest.warns(InvalidEntitiesWarning, match=r"left out of entities.ftm.json because .*: 2$") as warnings:
        written = conflicting.export("entities", tmp_path / "entities.json")
    conflicting.export("statements", tmp_path / "statements.csv")

    assert len(written.read_text().splitlines()) == PEOPLE - 2
    assert [one.filename for one in warnings] == [__file__]


@pytest.mark.parametrize("name", ["stream", "invalid"])
def test_entity_named_like_a_route_is_read_like_any_other(people: Dataset, name: str):
    with pytest.raises(Problem) as missing:
        people.entity(name)
    with people.writer("crawl") as writer:
        writer.add({"id": name, "schema": "Person", "properties": {"name": ["A"]}})
    entity = people.entity(name)
    with people.writer("register") as writer:
        writer.add({"id": name, "schema": "Vessel", "properties": {}})
    with pytest.raises(Problem) as invalid:
        people.entity(name)

    assert (entity["id"], entity["caption"]) == (name, "A")
    assert (missing.value.slug, missing.value.status) == ("entity-not-found", 404)
    assert (invalid.value.slug, invalid.value.status) == ("schema-violation", 422)


def test_import_of_the_package_loads_neither_the_server_nor_large_libraries():
    code = "import sys, tarn_client; print(*sys.modules)"

    modules = subprocess.run([sys.executable, "-c", code], cwd=SDK, capture_output=True, text=True, check=True).stdout

    assert "tarn_client.records" in modules.split()
    assert {"tarn", "httpx", "pyarrow", "pandas", "polars", "duckdb", "pyspark"}.isdisjoint(modules.split())
