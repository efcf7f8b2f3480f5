"""Reading with the Python package: records, and tables of every library."""

import json
import subprocess
import sys
from collections.abc import Generator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import duckdb
import pytest
from tarn_client import BrokenOff, Dataset, InvalidEntitiesWarning, Lake, Problem
from tarn_client.records import Records

from tests.clients.conftest import person
from tests.clients.proxy import Cut, cutting
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
    """The ids that every form of a table has."""
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


def test_tables_have_what_records_have(people: Dataset):
    (entity,), (statement,) = people.entities(id="p00007"), people.statements(id="p00007", prop="name")
    (entity_row,) = people.entities(id="p00007").arrow().to_pylist(maps_as_pydicts="strict")
    (statement_row,) = people.statements(id="p00007", prop="name").arrow().to_pylist()

    def shown(row: dict) -> dict:
        return json.loads(json.dumps(row, default=lambda moment: moment.isoformat().replace("+00:00", "Z")))

    assert entity_row.keys() == entity.keys()
    assert {key: entity_row[key] for key in ("id", "caption", "properties", "origin")} == {
        key: entity[key] for key in ("id", "caption", "properties", "origin")
    }
    assert shown(statement_row).keys() == statement.keys()
    assert (statement_row["value"], statement_row["external"]) == (statement["value"], statement["external"])
    assert (entity_row["first_seen"], statement_row["first_seen"]) == (statement_row["last_seen"],) * 2


def test_conditions_order_and_limit_are_the_servers(people: Dataset):
    where = {"field": "prop:name", "op": "in", "value": ["Person 3", "Person 5", "Person 7"]}

    found = [entity["id"] for entity in people.entities(where=where, schemata="LegalEntity", sort="-prop:name")]

    assert found == ["p00007", "p00005", "p00003"]
    assert [entity["id"] for entity in people.entities(limit=2)] == ["p00000", "p00001"]
    assert list(people.entities(schema="Company")) == []
    assert people.entities(schema="Company").arrow().num_rows == 0


def test_what_is_not_there_is_a_problem_with_its_kind(lake: Lake, people: Dataset):
    with pytest.raises(Problem) as dataset:
        list(lake.dataset("nonsense").entities())
    with pytest.raises(Problem) as entity:
        people.entity("nobody")

    assert (dataset.value.slug, entity.value.slug) == ("dataset-not-found", "entity-not-found")
    assert people.snapshot() is None
    assert people.name in {found.name for found in lake.datasets()}


@pytest.mark.parametrize("form", ["records", "arrow"])
def test_stream_that_is_cut_is_never_taken_for_the_whole(people: Dataset, server: Server, form: str):
    with cutting(server.url, [Cut(down=1500)]) as proxy, Lake(proxy.url, server.admin_key) as cut_off:
        statements = cut_off.dataset(people.name).statements()
        with pytest.raises(BrokenOff):
            list(statements if form == "records" else statements.batches())


@pytest.fixture
def disagreeing(people: Dataset) -> Dataset:
    """People, two of whom another origin takes for vessels."""
    with people.writer("register") as writer:
        writer.add_all({"id": f"p{number:05}", "schema": "Vessel", "properties": {}} for number in (3, 7))
    return people


OMITTED = r"statements do not assemble: 2, the first is 'p00003' \(No common schema: Person, Vessel\)"


@pytest.mark.parametrize("asked", [{}, {"sort": "id"}, {"where": {"field": "id", "op": "ne", "value": "x"}}])
def test_entities_that_do_not_assemble_are_left_out_with_a_warning(disagreeing: Dataset, asked: dict):
    entities = disagreeing.entities(**asked)

    with pytest.warns(InvalidEntitiesWarning, match=OMITTED) as warned:
        found = [entity["id"] for entity in entities]

    assert len(found) == PEOPLE - 2
    assert {"p00003", "p00007"}.isdisjoint(found)
    assert [one.filename for one in warned] == [__file__]
    assert (entities.invalid_count, [one["id"] for one in entities.invalid]) == (2, ["p00003", "p00007"])


def test_table_of_entities_warns_of_those_that_it_lacks(disagreeing: Dataset):
    with pytest.warns(InvalidEntitiesWarning, match=OMITTED):
        assert disagreeing.entities().arrow().num_rows == PEOPLE - 2


def test_reader_that_stops_early_is_warned_of_what_was_left_out_before(disagreeing: Dataset):
    reading = iter(disagreeing.entities())
    assert isinstance(reading, Generator)
    before = [next(reading)["id"] for _ in range(4)]

    with pytest.warns(InvalidEntitiesWarning, match="assemble: 1, the first is 'p00003'"):
        reading.close()

    assert before == ["p00000", "p00001", "p00002", "p00004"]


def test_more_invalid_entities_than_are_kept_are_counted(disagreeing: Dataset, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tarn_client.records.MOST_INVALID", 1)
    entities = disagreeing.entities()

    with pytest.warns(InvalidEntitiesWarning):
        list(entities)

    assert (entities.invalid_count, [one["id"] for one in entities.invalid]) == (2, ["p00003"])


def test_invalid_entities_are_read_with_the_schemata_of_each_origin(disagreeing: Dataset, people: Dataset):
    found = list(disagreeing.invalid_entities())

    assert [one["id"] for one in found] == ["p00003", "p00007"]
    assert found[0]["by_origin"] == [
        {"origin": "crawl", "schemata": ["Person"]},
        {"origin": "register", "schemata": ["Vessel"]},
    ]


def test_export_warns_of_the_entities_that_its_file_leaves_out(
    disagreeing: Dataset, server: Server, kernel_process: ProcessPoolExecutor, tmp_path: Path
):
    make_exports(server, disagreeing.name, kernel_process)

    with pytest.warns(InvalidEntitiesWarning, match=r"left out of entities.ftm.json because .*: 2$") as warned:
        written = disagreeing.export("entities", tmp_path / "entities.json")
    disagreeing.export("statements", tmp_path / "statements.csv")

    assert len(written.read_text().splitlines()) == PEOPLE - 2
    assert [one.filename for one in warned] == [__file__]


@pytest.mark.parametrize("name", ["stream", "invalid"])
def test_entity_named_like_a_route_is_read_as_any_other(people: Dataset, name: str):
    with pytest.raises(Problem) as missing:
        people.entity(name)
    with people.writer("crawl") as writer:
        writer.add({"id": name, "schema": "Person", "properties": {"name": ["A"]}})
    found = people.entity(name)
    with people.writer("register") as writer:
        writer.add({"id": name, "schema": "Vessel", "properties": {}})
    with pytest.raises(Problem) as invalid:
        people.entity(name)

    assert (found["id"], found["caption"]) == (name, "A")
    assert (missing.value.slug, missing.value.status) == ("entity-not-found", 404)
    assert (invalid.value.slug, invalid.value.status) == ("schema-violation", 422)


def test_package_imports_no_library_of_tables_before_it_is_used():
    code = "import sys, tarn_client; print(*sys.modules)"

    loaded = subprocess.run([sys.executable, "-c", code], cwd=SDK, capture_output=True, text=True, check=True).stdout

    assert "tarn_client.records" in loaded.split()
    assert {"pyarrow", "pandas", "polars", "duckdb", "pyspark"}.isdisjoint(loaded.split())
