"""Transactions: atomicity, isolation, and errors."""

import threading
from pathlib import Path

import pytest
from sqlalchemy import insert, select, text
from sqlalchemy.exc import SQLAlchemyError
from tarn.db.engine import Database
from tarn.db.tables import lake
from tarn.errors import StartRefused, Unavailable

pytestmark = pytest.mark.both_databases


def test_failed_write_leaves_nothing(database: Database):
    with pytest.raises(ZeroDivisionError), database.write() as connection:
        connection.execute(insert(lake).values(id="a"))
        raise ZeroDivisionError

    with database.read() as connection:
        assert connection.execute(select(lake)).all() == []


def test_read_transaction_has_one_state_despite_concurrent_writes(database: Database):
    with database.read() as reading:
        before = reading.execute(select(lake)).all()
        with database.write() as connection:
            connection.execute(insert(lake).values(id="a"))
        during = reading.execute(select(lake)).all()
    with database.read() as connection:
        after = connection.execute(select(lake)).scalars().all()

    assert (before, during, after) == ([], [], ["a"])


def test_concurrent_increments_of_a_counter_lose_nothing(database: Database):
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


def test_unreachable_database_is_unavailable():
    database = Database("postgresql+psycopg://nobody@127.0.0.1:1/none")

    with pytest.raises(Unavailable) as unavailable, database.read():
        pass
    assert unavailable.value.retry_after
    database.close()


def test_database_error_does_not_contain_the_values_of_a_statement(database: Database):
    with pytest.raises((SQLAlchemyError, Unavailable)) as caught, database.read() as connection:
        connection.execute(text("SELECT * FROM nothing WHERE a = :a"), {"a": "hunter2"})

    assert "nothing" in str(caught.value.__cause__ or caught.value)
    assert "hunter2" not in f"{caught.value} {caught.value.__cause__}"


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/proc/x/y.db", "/proc/x/y.db cannot be used: No such file"),
        ("{}/folder", "is a folder"),
        ("{}/text", "file is not a database"),
        ("{}/text/y.db", "cannot be used"),
    ],
)
def test_sqlite_file_that_cannot_be_opened_stops_the_start(tmp_path: Path, path: str, sentence: str):
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("no database, " * 1000)

    with pytest.raises(StartRefused, match=f"^TARN_DATABASE_URL: .*{sentence}"):
        Database(f"sqlite:///{path.format(tmp_path)}")


def test_sqlite_is_durable_and_readers_are_not_blocked_by_a_writer(tmp_path):
    database = Database(f"sqlite:///{tmp_path}/a/b/tarn.db")

    with database.read() as connection:
        pragmas = [connection.execute(text(f"PRAGMA {name}")).scalar() for name in ("journal_mode", "synchronous")]

    assert pragmas == ["wal", 2]
    database.close()


def test_new_sqlite_database_can_be_opened_by_several_threads_at_once(tmp_path):
    failures: list[Exception] = []

    def open_at_once(url: str, barrier: threading.Barrier) -> None:
        barrier.wait()
        database = Database(url)
        try:
            with database.write() as connection:
                connection.execute(text("SELECT 1"))
        except Exception as error:  # noqa: BLE001 - the test fails with any error
            failures.append(error)
        database.close()

    for number in range(40):
        url, barrier = f"sqlite:///{tmp_path}/{number}.db", threading.Barrier(6)
        threads = [threading.Thread(target=open_at_once, args=[url, barrier]) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert failures == []
