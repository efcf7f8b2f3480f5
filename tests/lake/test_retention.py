"""Retention of snapshots and of old entries."""

from datetime import UTC, datetime, timedelta

import pytest
from pydantic import ValidationError
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.lake import refs, retention, snapshots
from tarn.lake.retention import PRESENT, HistoryStart, RetentionRule
from tarn.model.datasets.dataset import Retention
from tarn.model.datasets.snapshot import Snapshot
from tarn.model.names import RefName
from tarn.model.work.job import VacuumOptions
from tarn.storage.store import Store

from tests.in_process_api import InProcessApi
from tests.lake.manifests import T0, dataset_of, history

AT = T0 + timedelta(hours=100)
"""A hundred hours after the snapshots were published, one second apart."""

ASKED = VacuumOptions()


@pytest.fixture
def dataset(api: InProcessApi, database: Database) -> Dataset:
    api.dataset("donations")
    return dataset_of(database, "donations")


@pytest.fixture
def published(database: Database, store: Store, dataset: Dataset) -> list[Snapshot]:
    return history(database, store, dataset, 6)


def tail(database: Database, dataset: Dataset, keep: RetentionRule, moment: datetime = AT) -> HistoryStart | None:
    with database.read() as connection:
        return retention.history_start(connection, dataset, keep, moment)


@pytest.mark.parametrize(
    ("count", "hours", "then"),
    [
        (100, 0, 1),
        (6, 0, 1),
        (5, 0, 3),  # one too many: the vacuum's own counts among the five
        (2, 0, 6),
        (1, 0, 7),
        (1, 101, 1),
        (1, 100, 1),
        (1, 100 - 3.5 / 3600, 4),  # those published one, two and three seconds later
        (3, 100 - 3.5 / 3600, 4),
        (5, 100 - 3.5 / 3600, 3),
        (1, 1e300, 1),
        (1, float("inf"), 1),
    ],
)
def test_snapshot_is_expired_only_if_it_is_beyond_both_count_and_age(
    database: Database, dataset: Dataset, published: list[Snapshot], count: int, hours: float, then: int
):
    assert tail(database, dataset, RetentionRule(count, hours, 24)) == (1, then)


def test_dataset_without_snapshots_has_no_tail(database: Database, dataset: Dataset):
    assert tail(database, dataset, PRESENT) is None


def test_ref_keeps_its_snapshot_and_all_later_ones(database: Database, dataset: Dataset, published: list[Snapshot]):
    with database.write() as connection:
        refs.put(connection, dataset, RefName("later"), "4", "admin")
        refs.put(connection, dataset, RefName("release"), "3", "admin")

    assert tail(database, dataset, PRESENT) == (1, 3)


def test_tail_never_decreases(database: Database, dataset: Dataset, published: list[Snapshot]):
    with database.write() as connection:
        snapshots.expire(connection, dataset, 4)

    assert tail(database, dataset, RetentionRule(100, 1e6, 24)) == (4, 4)
    assert tail(database, dataset, RetentionRule(2, 0, 24)) == (4, 6)


def test_policy_applies_unless_an_age_is_requested():
    policy = Retention(count=7, days=2)

    assert RetentionRule.of(policy, ASKED) == RetentionRule(7, 48, 24)
    assert RetentionRule.of(policy, VacuumOptions(override_floor=True)) == RetentionRule(7, 48, 0)
    assert RetentionRule.of(policy, VacuumOptions(retention_hours=30)) == RetentionRule(1, 30, 30)
    assert RetentionRule.of(policy, VacuumOptions(retention_hours=0, override_floor=True)) == RetentionRule(1, 0, 0)


@pytest.mark.parametrize("hours", [0, 1, 23.99])
def test_age_below_a_day_is_refused_unless_forced(hours: float):
    with pytest.raises(ValidationError, match="`retention_hours` below 24 needs `override_floor`"):
        VacuumOptions(retention_hours=hours)

    assert VacuumOptions(retention_hours=hours, override_floor=True).retention_hours == hours


def test_old_and_excess_entries_are_expired_oldest_first():
    moment = datetime(2030, 1, 2, tzinfo=UTC)
    ages = [moment - timedelta(hours=hours) for hours in (9, 8, 7, 6)]

    assert RetentionRule(1, 0, 0).expired_count(ages, moment) == 3
    assert RetentionRule(3, 0, 0).expired_count(ages, moment) == 1
    assert RetentionRule(4, 0, 0).expired_count(ages, moment) == 0
    assert RetentionRule(1, 7.5, 0).expired_count(ages, moment) == 2
    assert RetentionRule(1, 0, 0).expired_count([], moment) == 0
