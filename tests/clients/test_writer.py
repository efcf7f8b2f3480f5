"""Writing with the Python package: in chunks, each once, whatever happens to the connection."""

from uuid import uuid4

import pytest
from followthemoney import model
from tarn_client import Dataset, Lake, Problem, Unreachable

from tests.clients.conftest import person
from tests.clients.proxy import Cut, cutting
from tests.server import Server

COUNT = 2000
SMALL_CHUNK = 5_000
"""Bytes of a chunk, where a test wants many of them."""


def test_writer_sends_chunks_and_tells_what_was_written(dataset: Dataset, server: Server):
    with dataset.writer("crawl", chunk_bytes=SMALL_CHUNK) as writer:
        writer.add_all(person(number) for number in range(COUNT))
    journal = server.client().get(f"/v1/datasets/{dataset.name}/journal").json()

    assert (writer.written.entities, writer.written.statements) == (COUNT, 2 * COUNT)
    assert writer.written.commit == journal["commit"] > 5
    assert {entity["id"] for entity in dataset.entities(origin="crawl")} == {f"p{n:05}" for n in range(COUNT)}


def test_writer_takes_objects_of_followthemoney_and_statements(dataset: Dataset):
    jane = model.make_entity("Person")
    jane.id = "jane"
    jane.add("name", "Jane Doe")
    statement = {"entity_id": "joe", "canonical_id": "joe", "schema": "Person", "prop": "name", "value": "Joe"}

    with dataset.writer() as entities:
        entities.add(jane)
    with dataset.writer("facts", records="statements") as statements:
        statements.add(statement)

    assert dataset.entity("jane")["caption"] == "Jane Doe"
    assert [(row["entity_id"], row["value"]) for row in dataset.statements(origin="facts")] == [("joe", "Joe")]
    assert dataset.delete("jane") == 2


CUTS = [Cut(up=500), Cut(down=0), Cut(down=700), Cut(up=2_500), Cut(down=1_500), Cut(down=0)]
"""Within a request, before an answer, within a later answer, within a later request, and so on."""


@pytest.mark.parametrize("atomic", [False, True])
def test_connection_that_is_cut_again_and_again_loses_nothing_and_doubles_nothing(
    dataset: Dataset, server: Server, atomic: bool
):
    with cutting(server.url, CUTS) as proxy, Lake(proxy.url, server.admin_key) as cut_off:
        with cut_off.dataset(dataset.name).writer("crawl", atomic=atomic, chunk_bytes=SMALL_CHUNK) as writer:
            writer.add_all(person(number) for number in range(COUNT))
        broken = proxy.broken
    journal = server.client().get(f"/v1/datasets/{dataset.name}/journal").json()

    assert broken == len(CUTS)
    assert (writer.written.entities, writer.written.statements) == (COUNT, 2 * COUNT)
    # Rows of the journal, which a request that was done twice would have twice.
    assert (journal["rows"], journal["commit"]) == (2 * COUNT, writer.written.commit)
    assert [entity["id"] for entity in dataset.entities()] == [f"p{n:05}" for n in range(COUNT)]


def test_atomic_writer_whose_block_fails_leaves_nothing(dataset: Dataset, server: Server):
    def until_it_fails() -> None:
        with dataset.writer("crawl", atomic=True, chunk_bytes=100) as writer:
            writer.add_all(person(number) for number in range(10))
            raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        until_it_fails()
    stages = server.client().get(f"/v1/datasets/{dataset.name}/stages").json()["results"]

    assert list(dataset.entities()) == []
    assert [stage["state"] for stage in stages if stage["state"] == "open"] == []


def test_bad_record_is_named_by_its_number_among_all(dataset: Dataset):
    people = [person(number) for number in range(50)]
    people[40] = {"id": "bad", "schema": "Nonsense", "properties": {}}

    with dataset.writer("crawl", chunk_bytes=1000, on_error="skip") as skipping:
        skipping.add_all(people)
    with pytest.raises(Problem) as refused, dataset.writer("crawl", chunk_bytes=1000) as refusing:
        refusing.add_all(people)

    assert (skipping.written.entities, skipping.written.rejected) == (49, 1)
    assert [fault["line"] for fault in skipping.written.errors] == [41]
    assert (refused.value.slug, refused.value.errors[0]["line"]) == ("schema-violation", 41)


def test_server_that_asks_to_wait_is_waited_for_and_who_has_no_patience_hears_of_it(lake: Lake, server: Server):
    admin, tenant = server.client(), f"t{uuid4().hex[:12]}"
    admin.post("/v1/admin/tenants", json={"name": tenant}).raise_for_status()
    admin.post(f"/v1/admin/tenants/{tenant}/grants", json={"dataset": f"{tenant}_*", "level": "admin"})
    admin.put(f"/v1/admin/tenants/{tenant}/limits", json={"rate_limit": 2, "rate_burst": 1}).raise_for_status()
    key = admin.post(f"/v1/admin/tenants/{tenant}/keys", json={}).json()["key"]

    with Lake(server.url, key) as slow, Lake(server.url, key, patience=0) as hasty:
        limited = slow.create(f"{tenant}_one")
        with limited.writer("crawl", chunk_bytes=1) as writer:
            writer.add_all(person(number) for number in range(3))
        with pytest.raises(Problem) as refused:
            [hasty.whoami() for _ in range(50)]

    assert writer.written.entities == 3
    assert (refused.value.slug, refused.value.retry_after is not None) == ("rate-limited", True)


def test_no_server_is_said_when_patience_is_at_its_end():
    with Lake("http://127.0.0.1:1", "key", patience=0.3) as nowhere, pytest.raises(Unreachable):
        nowhere.whoami()
