"""Transactions."""

import threading

import pytest
from sqlalchemy import insert, select, text

from app.db.engine import Database
from app.db.tables import lake
from app.errors import Unavailable


def test_write_that_fails_leaves_nothing(database: Database):
    with pytest.raises(ZeroDivisionError), database.write() as connection:
        connection.execute(insert(lake).values(id="a"))
        raise ZeroDivisionError

    with database.read() as connection:
        assert connection.execute(select(lake)).all() == []


def test_read_sees_one_moment_whatever_is_written_meanwhile(database: Database):
    with database.read() as reading:
        before = reading.execute(select(lake)).all()
        with database.write() as connection:
            connection.execute(insert(lake).values(id="a"))
        during = reading.execute(select(lake)).all()
    with database.read() as connection:
        after = connection.execute(select(lake)).scalars().all()

    assert (before, during, after) == ([], [], ["a"])


def test_counters_raised_by_many_writers_lose_nothing(database: Database):
    with database.write() as connection:
        connection.execute(text("CREATE TABLE counter (n INTEGER)"))
        connection.execute(text("INSERT INTO counter VALUES (0)"))

    def count() -> None:
        for _ in range(20):
            with database.write() as connection:
                database.serialize(connection, "counter")
                n = connection.execute(text("SELECT n FROM counter")).scalar_one()
                connection.execute(text("UPDATE counter SET n = :n"), {"n": n + 1})

    threads = [threading.Thread(target=count) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    with database.read() as connection:
        assert connection.execute(text("SELECT n FROM counter")).scalar() == 120


def test_database_that_does_not_answer_is_unavailable():
    database = Database("postgresql+psycopg://nobody@127.0.0.1:1/none")

    with pytest.raises(Unavailable):
        database.ping()
    database.close()


def test_sqlite_is_durable_and_lets_readers_read_while_one_writes(tmp_path):
    database = Database(f"sqlite:///{tmp_path}/a/b/tarn.db")

    with database.read() as connection:
        pragmas = [connection.execute(text(f"PRAGMA {name}")).scalar() for name in ("journal_mode", "synchronous")]

    assert pragmas == ["wal", 2]
    database.close()
