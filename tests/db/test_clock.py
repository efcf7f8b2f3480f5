"""The database's clock: independent of changes of the machine's clock."""

from datetime import timedelta

import pytest
from sqlalchemy import select
from tarn.db import database_clock
from tarn.db.database_clock import database_time
from tarn.db.engine import Database
from tarn.db.tables import clock as clock_table
from tarn.model import ids

from tests.in_process_api import ONE_DATABASE

pytestmark = pytest.mark.both_databases

TOLERANCE = timedelta(minutes=5)


def read_clock(database: Database):
    with database.write() as connection:
        return database_time(connection)


@pytest.mark.parametrize("hours", [-1, 1])
def test_time_advances_when_the_clock_of_the_machine_is_set(database: Database, monkeypatch, hours: int):
    before = read_clock(database)
    monkeypatch.setattr(database_clock, "now", lambda: ids.now() + timedelta(hours=hours))
    with database.read() as connection:
        read = database_time(connection)

    assert abs(before - ids.now()) < TOLERANCE
    assert before <= read <= read_clock(database) < before + TOLERANCE


@ONE_DATABASE
def test_restarted_machine_has_a_new_offset_and_time_never_goes_back(database: Database, monkeypatch):
    before = read_clock(database)
    monkeypatch.setattr(database_clock, "_boot", lambda: "another")
    monkeypatch.setattr(database_clock, "now", lambda: ids.now() - timedelta(hours=1))

    assert before - TOLERANCE < read_clock(database) < before + TOLERANCE
    monkeypatch.setattr(database_clock, "_boot", lambda: "a third")
    monkeypatch.setattr(database_clock, "now", lambda: ids.now() + timedelta(days=1))
    assert read_clock(database) > before + timedelta(hours=23)
    with database.read() as connection:
        assert [row.boot for row in connection.execute(select(clock_table))] == ["a third"]


@ONE_DATABASE
def test_read_of_the_clock_writes_nothing(database: Database):
    with database.read() as connection:
        database_time(connection)
        assert connection.execute(select(clock_table)).all() == []


@ONE_DATABASE
def test_machine_without_a_boot_id_uses_its_own_clock(database: Database, monkeypatch):
    monkeypatch.setattr(database_clock, "_boot", lambda: None)
    moment = ids.now()
    monkeypatch.setattr(database_clock, "now", lambda: moment)

    assert read_clock(database) == moment
