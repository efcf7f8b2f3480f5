"""Writes with the Python client: in chunks, each applied exactly once although connections break."""

from uuid import uuid4

import pytest
from followthemoney import model
from tarn_client import Dataset, Lake, Problem, Unreachable

from tests.clients.conftest import person
from tests.clients.proxy import Cut, cutting_proxy
from tests.server import Server

COUNT = 2000
SMALL_CHUNK = 5_000
"""Bytes of a chunk, for tests that need many chunks."""


def test_writer_sends_chunks_and_reports_the_written_records(dataset: Dataset, server: Server):
    with dataset.writer("crawl", chunk_bytes=SMALL_CHUNK) as writer:
        writer.add_all(person(number) for number in range(COUNT))
    journal = server.client().get(f"/v1/datasets/{dataset.name}/journal").json()

    assert (writer.written.entities, writer.written.statements) == (COUNT, 2 * COUNT)
    assert writer.written.commit == journal["commit"] > 5
    assert {entity["id"] for entity in dataset.entities(origin="crawl")} == {f"p{n:05}" for n in range(COUNT)}


def test_writer_accepts_entities_of_followthemoney_and_statements(dataset: Dataset):
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
"""Cuts within a request, before a response, within a later response, within a later request, and so on."""


@pytest.mark.parametrize("atomic", [False, True])
def test_repeatedly_cut_connection_loses_and_duplicates_nothing(dataset: Dataset, server: Server, atomic: bool):
    with cutting_proxy(server.url, CUTS) as proxy, Lake(proxy.url, server.admin_key) as lake:
        with lake.dataset(dataset.name).writer("crawl", atomic=atomic, chunk_bytes=SMALL_CHUNK) as writer:
            writer.add_all(person(number) for number in range(COUNT))
        cut_count = proxy.cut_count
    journal = server.client().get(f"/v1/datasets/{dataset.name}/journal").json()

    assert cut_count == len(CUTS)
    assert (writer.written.entities, writer.written.statements) == (COUNT, 2 * COUNT)
    # A request that was applied twice would have its rows in the journal twice.
    assert (journal["rows"], journal["commit"]) == (2 * COUNT, writer.written.commit)
    assert [entity["id"] for entity in dataset.entities()] == [f"p{n:05}" for n in range(COUNT)]


def test_atomic_writer_whose_block_fails_writes_nothing(dataset: Dataset, server: Server):
    def write_and_fail() -> None:
        with dataset.writer("crawl", atomic=True, chunk_bytes=100) as writer:
            writer.add_all(person(number) for number in range(10))
            raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        write_and_fail()
    stages = server.client().get(f"/v1/datasets/{dataset.name}/stages").json()["results"]

    assert list(dataset.entities()) == []
    assert [stage["state"] for stage in stages if stage["state"] == "open"] == []


def test_invalid_record_is_reported_by_its_number_among_all_records(dataset: Dataset):
    people = [person(number) for number in range(50)]
    people[40] = {"id": "bad", "schema": "Nonsense", "properties": {}}

    with dataset.writer("crawl", chunk_bytes=1000, on_error="skip") as skipping:
        skipping.add_all(people)
    with pytest.raises(Problem) as refused, dataset.writer("crawl", chunk_bytes=1000) as refusing:
        refusing.add_all(people)

    assert (skipping.written.entities, skipping.written.rejected) == (49, 1)
    assert [fault["line"] for fault in skipping.written.errors] == [41]
    assert (refused.value.slug, refused.value.errors[0]["line"]) == ("schema-violation", 41)


def test_rate_limited_request_is_retried_unless_retries_are_disabled(lake: Lake, server: Server):
    admin, tenant = server.client(), f"t{uuid4().hex[:12]}"
    admin.post("/v1/admin/tenants", json={"name": tenant}).raise_for_status()
    admin.post(f"/v1/admin/tenants/{tenant}/grants", json={"dataset": f"{tenant}_*", "level": "admin"})
    admin.put(f"/v1/admin/tenants/{tenant}/limits", json={"rate_limit": 2, "rate_burst": 1}).raise_for_status()
    key = admin.post(f"/v1/admin/tenants/{tenant}/keys", json={}).json()["key"]

    with Lake(server.url, key) as retrying, Lake(server.url, key, retry_timeout=0) as without_retries:
        limited = retrying.create(f"{tenant}_one")
        with limited.writer("crawl", chunk_bytes=1) as writer:
            writer.add_all(person(number) for number in range(3))
        with pytest.raises(Problem) as refused:
            [without_retries.whoami() for _ in range(50)]

    assert writer.written.entities == 3
    assert (refused.value.slug, refused.value.retry_after is not None) == ("rate-limited", True)


def test_missing_server_raises_unreachable_after_the_retry_timeout():
    with Lake("http://127.0.0.1:1", "key", retry_timeout=0.3) as lake, pytest.raises(Unreachable):
        lake.whoami()
