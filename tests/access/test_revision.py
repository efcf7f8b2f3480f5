"""Caches of callers and datasets: a change is effective with the next request in every process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import event
from tarn.access import revision
from tarn.access.revision import RevisionCache
from tarn.db.engine import Database
from tarn.main import build_services
from tarn.settings import Settings
from tarn.storage.store import Store

from tests.in_process_api import Caller, InProcessApi

pytestmark = pytest.mark.both_databases


@pytest.fixture
def other_process(api: InProcessApi, settings: Settings, store: Store) -> Iterator[InProcessApi]:
    """Return another API process on the same database, in which the administrator makes changes."""
    database = Database(settings.database_url)
    with InProcessApi(build_services(settings, database, store), str(api.admin.key)) as other_process:
        yield other_process
    database.close()


def test_cached_caller_and_dataset_cost_one_statement(api: InProcessApi):
    api.dataset("donations")
    alice = api.tenant("alice", donations="read")
    alice.get("/v1/datasets/donations")

    with _statements(api.services.database) as statements:
        response = alice.get("/v1/datasets/donations")

    assert response.status_code == 200
    assert statements == ["SELECT revision FROM access_revision"]


def _revoke(admin: Caller, alice: Caller) -> None:
    admin.delete(f"/v1/admin/keys/{str(alice.key).split('_')[1]}").raise_for_status()


def _ungrant(admin: Caller, _: Caller) -> None:
    grant = admin.get("/v1/admin/tenants/alice/grants").json()["results"][0]["id"]
    admin.delete(f"/v1/admin/grants/{grant}").raise_for_status()


def _disable(admin: Caller, _: Caller) -> None:
    admin.patch("/v1/admin/tenants/alice", {"disabled": True}).raise_for_status()


def _remove(admin: Caller, _: Caller) -> None:
    admin.delete("/v1/admin/tenants/alice").raise_for_status()


def _delete_dataset(admin: Caller, _: Caller) -> None:
    admin.delete("/v1/datasets/donations?confirm=donations").raise_for_status()


def _limit(admin: Caller, _: Caller) -> None:
    admin.put("/v1/admin/tenants/alice/limits", {"rate_limit": 0.001, "rate_burst": 1}).raise_for_status()


@pytest.mark.parametrize(
    ("change", "status"),
    [(_revoke, 401), (_ungrant, 404), (_disable, 401), (_remove, 401), (_delete_dataset, 404)],
)
def test_revocation_in_one_process_is_effective_with_the_next_request_in_another(
    api: InProcessApi, other_process: InProcessApi, change: Callable[[Caller, Caller], None], status: int
):
    api.dataset("donations")
    alice = api.tenant("alice", donations="read")
    before = [alice.get("/v1/datasets/donations").status_code for _ in range(2)]

    change(other_process.admin, alice)

    assert (before, alice.get("/v1/datasets/donations").status_code) == ([200, 200], status)


def test_grant_in_one_process_is_effective_with_the_next_request_in_another(
    api: InProcessApi, other_process: InProcessApi
):
    alice = api.tenant("alice", donations="read")
    before = [alice.get("/v1/datasets/donations").status_code for _ in range(2)]

    other_process.dataset("donations")
    created = alice.get("/v1/datasets/donations").status_code
    forbidden = alice.patch("/v1/datasets/donations", {"title": "x"}).status_code
    other_process.admin.post("/v1/admin/tenants/alice/grants", {"dataset": "don*", "level": "admin"}).raise_for_status()
    granted = alice.patch("/v1/datasets/donations", {"title": "x"}).status_code

    assert (before, created, forbidden, granted) == ([404, 404], 200, 403, 200)


def test_limit_set_in_one_process_applies_in_another(api: InProcessApi, other_process: InProcessApi):
    alice = api.tenant("alice")
    before = [alice.get("/v1/whoami").status_code for _ in range(2)]

    _limit(other_process.admin, alice)

    assert (before, [alice.get("/v1/whoami").status_code for _ in range(2)]) == ([200, 200], [200, 429])


def test_recreated_dataset_is_another_one(api: InProcessApi):
    api.dataset("donations")
    api.admin.get("/v1/datasets/donations")
    with api.services.database.write() as connection:
        connection.exec_driver_sql("UPDATE datasets SET state = 'deleted'")
        revision.bump(connection)

    created = api.dataset("donations")

    assert api.admin.get("/v1/datasets/donations").json()["id"] == created["id"]


def test_transaction_that_is_rolled_back_invalidates_nothing(database: Database):
    with database.read() as connection:
        before = revision.current(connection)
    with pytest.raises(ZeroDivisionError), database.write() as connection:
        revision.bump(connection)
        raise ZeroDivisionError

    with database.read() as connection:
        assert revision.current(connection) == before


def test_values_are_read_once_per_revision_and_the_oldest_are_evicted():
    cache: RevisionCache[str] = RevisionCache(max_size=2)
    reads: list[str] = []

    def read(present: str, question: str) -> None:
        cache.get(present, question, lambda: reads.append(f"{present}{question}") or "answer")  # type: ignore[func-returns-value]  # None, and then the answer

    for present, question in [("1", "a"), ("1", "a"), ("1", "b"), ("1", "a"), ("2", "a"), ("1", "a"), ("1", "b")]:
        read(present, question)

    assert reads == ["1a", "1b", "2a", "1b"]


def test_refusal_is_not_cached():
    cache: RevisionCache[str] = RevisionCache()

    def refuse() -> str:
        raise LookupError

    with pytest.raises(LookupError):
        cache.get("1", "a", refuse)

    assert cache.get("1", "a", lambda: "answer") == "answer"


@contextmanager
def _statements(database: Database) -> Iterator[list[str]]:
    seen: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        seen.extend({statement} - {"BEGIN"})

    event.listen(database.engine, "before_cursor_execute", note)
    yield seen
    event.remove(database.engine, "before_cursor_execute", note)
