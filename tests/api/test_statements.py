"""Write statements over HTTP."""

import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from followthemoney.statement.serialize import CSV, JSON, PACK, get_statement_writer
from followthemoney.statement.statement import Statement

from tests.in_process_api import NOTHING_LEFT_OUT, InProcessApi
from tests.journal import journal

PATH = "/v1/datasets/test/statements"
NDJSON = {"Content-Type": "application/x-ndjson"}
ROW = {"entity_id": "jane", "prop": "name", "schema": "Person", "value": "Jane Doe"}


@pytest.fixture(autouse=True)
def dataset(api: InProcessApi):
    api.dataset("test")


def statements(count: int = 3) -> list[Statement]:
    return [
        Statement(
            entity_id=f"e{number}",
            prop="name",
            schema="Person",
            value=f'Näme, "{number}"\nand more \U0001f600',
            dataset="elsewhere",
            lang="eng",
            original_value="ORIGINAL",
            first_seen="2020-01-01T00:00:00",
            last_seen="2021-01-01T00:00:00",
            external=number == 1,
            origin="theirs",
        )
        for number in range(count)
    ]


def written_by_ftm(form: str) -> bytes:
    buffer = io.BytesIO()
    writer = get_statement_writer(buffer, form)
    for statement in statements():
        writer.write(statement)
    writer.close()
    return buffer.getvalue()


def table() -> pa.Table:
    return pa.Table.from_pylist([dict(s.to_dict()) for s in statements()])


def parquet() -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table(), buffer)
    return buffer.getvalue()


def arrow() -> bytes:
    buffer = io.BytesIO()
    with pa.ipc.new_stream(buffer, table().schema) as stream:
        stream.write_table(table())
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/x-ndjson", lambda: written_by_ftm(JSON)),
        ("text/csv", lambda: written_by_ftm(CSV)),
        ("text/csv; charset=utf-8", lambda: written_by_ftm(CSV)),
        ("application/x-ftm-pack", lambda: written_by_ftm(PACK)),
        ("application/vnd.apache.parquet", parquet),
        ("application/vnd.apache.arrow.stream", arrow),
    ],
)
def test_every_format_of_the_same_statements_is_stored_alike_with_computed_ids(api: InProcessApi, kind: str, body):
    response = api.admin("POST", PATH, content=body(), headers={"Content-Type": kind})

    assert response.json() == {
        "entities": 0,
        "statements": 3,
        "rejected": 0,
        "commit": 1,
        "snapshot": None,
        **NOTHING_LEFT_OUT,
    }
    stored = [
        (row["id"].hex(), row["value"], row["lang"], row["original_value"], row["external"], row["origin"],
         row["first_seen"], row["last_seen"])
        for row in journal.rows(api)
    ]  # fmt: skip
    assert stored == [
        (Statement.make_key("test", s.entity_id, "name", s.value, s.external, s.lang), s.value, "eng", "ORIGINAL",
         s.external, "theirs", 1577836800000000, 1609459200000000)
        for s in statements()
    ]  # fmt: skip


def test_origin_in_the_query_applies_to_every_statement(api: InProcessApi):
    api.admin("POST", PATH, content=written_by_ftm(JSON), headers=NDJSON, params={"origin": "ours"})

    assert {row["origin"] for row in journal.rows(api)} == {"ours"}


@pytest.mark.parametrize(
    ("change", "field", "reason"),
    [
        ({"schema": "Banana"}, "schema", "is not a schema"),
        ({"prop": "imoNumber"}, "prop", "is not a property of Person"),
        ({"prop": "ownershipOwner"}, "prop", "other side"),
        ({"prop": None}, "prop", "is missing"),
        ({"value": None}, "value", "is missing"),
        ({"value": 5}, "value", "must be a string"),
        ({"value": "a\x00b"}, "value", "NUL"),
        ({"entity_id": None}, "entity_id", "is missing"),
        ({"entity_id": "x" * 256}, "entity_id", "256 characters"),
        ({"canonical_id": 5}, "canonical_id", "must be a string"),
        ({"external": "yes"}, "external", "true or false"),
        ({"first_seen": "soon"}, "first_seen", "ISO 8601"),
        ({"origin": "../../evil"}, "origin", "must be letters"),
        ({"origin": "a'b"}, "origin", "must be letters"),
    ],
)
def test_bad_statement_is_named_and_nothing_is_stored(api: InProcessApi, change, field: str, reason: str):
    body = json.dumps(ROW) + "\n" + json.dumps(ROW | change) + "\n"

    response = api.admin("POST", PATH, content=body, headers=NDJSON)

    assert response.status_code == 422
    assert (response.json()["errors"][0]["line"], response.json()["errors"][0]["field"]) == (2, field)
    assert reason in response.json()["errors"][0]["reason"]
    assert journal.count(api) == 0


@pytest.mark.parametrize("claim", [{"id": "0" * 40}, {"dataset": "elsewhere"}])
def test_wrong_id_and_dataset_are_recomputed_or_refused_when_strict(api: InProcessApi, claim):
    body = json.dumps(ROW | claim)

    strict = api.admin("POST", PATH, content=body, headers=NDJSON, params={"strict": "true"})
    recomputed = api.admin("POST", PATH, content=body, headers=NDJSON)

    assert (strict.status_code, strict.json()["errors"][0]["field"]) == (422, next(iter(claim)))
    assert recomputed.status_code == 200
    assert [row["id"].hex() for row in journal.rows(api)] == ["d5f32d066d6f1679e1ba2bd0b1ef9f474b2e0cfd"]


def test_strict_accepts_correct_ids_and_datasets(api: InProcessApi):
    right = ROW | {"id": "d5f32d066d6f1679e1ba2bd0b1ef9f474b2e0cfd", "dataset": "test"}

    response = api.admin("POST", PATH, content=json.dumps(right), headers=NDJSON, params={"strict": "true"})

    assert response.status_code == 200


def test_statement_is_deleted_in_one_origin_or_in_all(api: InProcessApi):
    for origin in ("a", "b", "c"):
        api.admin("POST", PATH, content=json.dumps(ROW), headers=NDJSON, params={"origin": origin})
    statement = "d5f32d066d6f1679e1ba2bd0b1ef9f474b2e0cfd"

    counts = [
        api.admin.delete(f"{PATH}/{statement}", params={"origin": "a"}).json()["tombstones"],
        api.admin.delete(f"{PATH}/{statement}", params={"origin": "a"}).json()["tombstones"],
        api.admin.delete(f"{PATH}/{statement}").json()["tombstones"],
        api.admin.delete(f"{PATH}/{statement}").json()["tombstones"],
        api.admin.delete(f"{PATH}/{'0' * 40}").json()["tombstones"],
    ]

    assert counts == [1, 0, 2, 0, 0]
    assert api.admin.delete(f"{PATH}/not-an-id").status_code == 422


def test_origin_is_deleted_by_one_event(api: InProcessApi):
    for number in range(5):
        row = json.dumps(ROW | {"entity_id": f"e{number}"})
        for origin in ("a", "b"):
            api.admin("POST", PATH, content=row, headers=NDJSON, params={"origin": origin})

    first = api.admin.delete("/v1/datasets/test/origins/a").json()
    again = api.admin.delete("/v1/datasets/test/origins/a").json()

    assert (first["tombstones"], again["tombstones"]) == (5, 0)
    assert [(row["kind"], row["entity_id"], row["origin"]) for row in journal.rows(api) if row["kind"] == 3] == [
        (3, None, "a"),
        (3, None, "a"),
    ]
