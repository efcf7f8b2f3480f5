"""The audit log: repeated denials are aggregated, and old records expire."""

from datetime import timedelta

import pytest
from sqlalchemy import insert
from tarn.access import audit
from tarn.access.audit import RECORD_SECONDS, AuditedAction, AuditFilter, AuditLog, Denials
from tarn.db import tables
from tarn.db.engine import Database
from tarn.errors import DatasetNotFound, Forbidden, Unauthenticated
from tarn.model.ids import first_id, new_id, now
from tarn.model.names import TenantName
from tarn.model.tenant import AuditEntry, Identity

pytestmark = pytest.mark.both_databases

ALICE = Identity(TenantName("alice"), "k1", (), 0, 0)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def records(database: Database) -> list[AuditEntry]:
    return AuditLog(database).page(AuditFilter(), None, 1000)[::-1]


def test_repeated_denials_are_one_record_with_a_count(database: Database):
    denials = Denials(database)

    for number in range(200):
        denials.record(AuditedAction(None, "whoami", "/v1/whoami", f"r{number}"), Unauthenticated("no"))
    denials.close()

    [entry] = records(database)
    assert (entry.request, entry.detail) == ("r0", {"problem": "unauthenticated", "detail": "no", "count": 200})


def test_denials_of_different_keys_routes_and_reasons_are_separate_records(database: Database):
    denials = Denials(database)

    denials.record(AuditedAction(None, "whoami", "/v1/whoami", "r"), Unauthenticated("no", key="k1"))
    denials.record(AuditedAction(None, "whoami", "/v1/whoami", "r"), Unauthenticated("no", key="k2"))
    denials.record(AuditedAction(ALICE, "get_dataset", "/v1/datasets/a", "r"), DatasetNotFound("no"))
    denials.record(AuditedAction(ALICE, "put_entity", "/v1/datasets/a", "r"), DatasetNotFound("no"))
    denials.record(AuditedAction(ALICE, "put_entity", "/v1/datasets/b", "r"), Forbidden("no"))
    denials.close()

    assert [(entry.tenant, entry.key, entry.action, entry.detail["count"]) for entry in records(database)] == [
        (None, "k1", "whoami", 1),
        (None, "k2", "whoami", 1),
        ("alice", "k1", "get_dataset", 1),
        ("alice", "k1", "put_entity", 1),
        ("alice", "k1", "put_entity", 1),
    ]


def test_denial_after_a_minute_is_a_new_record_and_the_old_one_keeps_its_count(database: Database):
    clock = Clock()
    denials = Denials(database, clock)
    act = AuditedAction(ALICE, "get_dataset", "/v1/datasets/a", "r")

    for moment in (0, 1, RECORD_SECONDS - 1, RECORD_SECONDS, RECORD_SECONDS + 1):
        clock.now = moment
        denials.record(act, DatasetNotFound("no"))
    denials.close()

    assert [entry.detail["count"] for entry in records(database)] == [3, 2]


@pytest.mark.parametrize("most", [2, 5000])
def test_records_beyond_their_retention_are_deleted_and_others_are_kept(database: Database, monkeypatch, most: int):
    monkeypatch.setattr(audit, "TRIM_ROWS", most)
    moment = now()
    old = [first_id(moment - timedelta(days=days)) + new_id()[13:] for days in (9, 8, 7, 6, 5)]
    with database.write() as connection:
        values = {"at": moment, "action": "a", "target": "t", "outcome": "done", "request": "r", "detail": {}}
        connection.execute(insert(tables.audit), [{"id": one, **values} for one in [*old, new_id()]])

    gone = audit.trim(database, moment - timedelta(days=5, minutes=1))

    assert gone == 4
    left = records(database)
    assert (len(left), left[0].id) == (2, old[-1])
