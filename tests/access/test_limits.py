"""Rate limits and quotas."""

import threading

import pytest
from tarn.access import limits, tenants
from tarn.access.limits import RateLimiter
from tarn.db.engine import Database
from tarn.errors import QuotaExceeded
from tarn.model.tenant import NewLimits, NewTenant
from tarn.settings import Settings

pytestmark = pytest.mark.both_databases


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_bucket_allows_its_burst_at_once_and_then_its_rate():
    clock = Clock()
    rate = RateLimiter(clock)

    at_once = [rate.acquire("a", rate=2, burst=3) for _ in range(4)]
    clock.now = 0.5
    later = [rate.acquire("a", rate=2, burst=3) for _ in range(2)]

    assert at_once == [0, 0, 0, 0.5]
    assert later == [0, 0.5]


def test_bucket_never_holds_more_than_its_burst():
    clock = Clock()
    rate = RateLimiter(clock)
    rate.acquire("a", rate=2, burst=3)
    clock.now = 1000

    assert [rate.acquire("a", rate=2, burst=3) for _ in range(4)] == [0, 0, 0, 0.5]


def test_quota_can_be_used_to_its_last_unit_and_released(database: Database, settings: Settings):
    tenant = _tenant(database, quota_statements=10)

    with database.write() as connection:
        limits.reserve(connection, tenant, settings, statements=10)
    with pytest.raises(QuotaExceeded), database.write() as connection:
        limits.reserve(connection, tenant, settings, statements=1)
    with database.write() as connection:
        limits.reserve(connection, tenant, settings, statements=-4)
        limits.reserve(connection, tenant, settings, statements=4, size=1 << 40)

    with database.read() as connection:
        assert limits.of(connection, tenant, settings).used_statements == 10


def test_concurrent_requests_for_the_last_units_never_exceed_the_quota(database: Database, settings: Settings):
    tenant = _tenant(database, quota_bytes=500)
    outcomes: list[bool] = []

    def take() -> None:
        try:
            with database.write() as connection:
                limits.reserve(connection, tenant, settings, size=100)
            outcomes.append(True)
        except QuotaExceeded:
            outcomes.append(False)

    threads = [threading.Thread(target=take) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    with database.read() as connection:
        assert (sum(outcomes), limits.of(connection, tenant, settings).used_bytes) == (5, 500)


def _tenant(database: Database, **quotas: int):
    with database.write() as connection:
        tenant = tenants.create(connection, NewTenant.model_validate({"name": "alice"}))
        limits.set_limits(connection, tenant.name, NewLimits(**quotas))
    return tenant.name
