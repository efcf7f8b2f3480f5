"""Notifications between processes: two `Database` objects on one database behave as two processes do."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import text
from tarn.db import notifications
from tarn.db.engine import Database
from tarn.db.notifications import EVERYTHING, Waiter, publish

pytestmark = pytest.mark.both_databases

LONG = 30.0
"""Seconds that a wait may take before its test fails. A notification takes a few milliseconds."""


@pytest.fixture
def sender(database_url: str) -> Iterator[Database]:
    with opened(database_url) as database:
        yield database


@pytest.fixture
def receiver(database_url: str) -> Iterator[Database]:
    with listening(database_url) as database:
        yield database


@contextmanager
def opened(database_url: str) -> Iterator[Database]:
    database = Database(database_url)
    try:
        yield database
    finally:
        database.close()


@contextmanager
def listening(database_url: str) -> Iterator[Database]:
    """Open a database that receives notifications already."""
    with opened(database_url) as database, subscribed(database) as waiter:
        database.notifications.listen()
        assert waiter.wait(LONG)  # everyone is woken when it begins
        yield database


@contextmanager
def subscribed(database: Database, *topics: str) -> Iterator[Waiter]:
    waiter = Waiter()
    with database.notifications.subscribed(topics or ["a"], waiter.wake):
        yield waiter


def send(database: Database, *topics: str) -> None:
    with database.write() as connection:
        publish(connection, *topics)


def test_commit_wakes_waiters_of_its_topics_in_another_process(sender: Database, receiver: Database):
    with subscribed(receiver, "a", "b") as waiter, subscribed(receiver, "c") as other:
        send(sender, "b", "d")
        assert waiter.wait(LONG)
        send(sender, "c")
        assert other.wait(LONG)
        assert not waiter.wait(0)


def test_commit_wakes_waiters_of_its_own_process_that_does_not_listen(sender: Database):
    with subscribed(sender) as waiter:
        send(sender, "a")
        assert waiter.wait(0)


def test_transaction_that_is_rolled_back_wakes_nobody(sender: Database, receiver: Database):
    with subscribed(sender) as own, subscribed(receiver) as waiter, subscribed(receiver, "end") as end:
        with pytest.raises(ZeroDivisionError), sender.write() as connection:
            publish(connection, "a")
            raise ZeroDivisionError
        send(sender, "end")
        assert end.wait(LONG)
        assert not waiter.wait(0)
        assert not own.wait(0)


def test_notification_arrives_after_its_commit_is_visible(sender: Database, receiver: Database):
    with sender.write() as connection:
        connection.execute(text("CREATE TABLE numbers (n INTEGER)"))
    with subscribed(receiver) as waiter:
        for count in range(1, 51):
            with sender.write() as connection:
                connection.execute(text("INSERT INTO numbers VALUES (1)"))
                publish(connection, "a")
            assert waiter.wait(LONG)
            with receiver.read() as connection:
                assert connection.execute(text("SELECT count(*) FROM numbers")).scalar_one() == count


def test_more_topics_than_a_message_holds_wake_everyone(sender: Database, receiver: Database):
    with subscribed(receiver, "a") as waiter:
        send(sender, *(f"topic-{number}" for number in range(1000)))
        assert waiter.wait(LONG)


def test_waiter_on_an_event_loop_is_woken(sender: Database, receiver: Database):
    async def wait() -> None:
        with receiver.notifications.subscribed_on_loop(["a"]) as woken:
            await asyncio.to_thread(send, sender, "a")
            async with asyncio.timeout(LONG):
                await woken.wait()

    asyncio.run(wait())


def test_waiter_that_was_woken_earlier_does_not_wait(sender: Database):
    with subscribed(sender) as waiter:
        send(sender, "a")
        send(sender, "a")
        assert waiter.wait(LONG)
        assert not waiter.wait(0)


def test_many_waiters_are_woken_by_one_notification(sender: Database, receiver: Database):
    with ExitStack() as stack:
        waiters = [stack.enter_context(subscribed(receiver)) for _ in range(50)]
        send(sender, "a")
        assert all(waiter.wait(LONG) for waiter in waiters)


def test_cut_channel_is_opened_again_and_wakes_everyone(
    database_url: str, sender: Database, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(notifications, "RECONNECT_SECONDS", 0.01)
    monkeypatch.setattr(notifications, "CHECK_SECONDS", 0.05)
    with listening(database_url) as receiver, subscribed(receiver) as waiter:
        cut(receiver)
        assert waiter.wait(LONG)
        send(sender, "a")
        assert waiter.wait(LONG)


def cut(database: Database) -> None:
    """Cut the channel of a listening process."""
    if database.is_sqlite:
        for path in folder_of(database).iterdir():
            path.unlink()
        return
    with database.write() as connection:
        listens = "pid <> pg_backend_pid() AND datname = current_database() AND query LIKE 'LISTEN%'"
        connection.execute(text(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {listens}"))


def test_closed_process_leaves_no_socket_and_no_thread(database_url: str, sender: Database):
    with listening(database_url) as database:
        assert "notifications" in {thread.name for thread in threading.enumerate()}
    assert "notifications" not in {thread.name for thread in threading.enumerate()}
    send(sender, "a")
    if database.is_sqlite:
        assert list(folder_of(database).iterdir()) == []


def folder_of(database: Database) -> Path:
    path = Path(str(database.engine.url.database))
    return path.with_name(f"{path.name}.listeners")


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_socket_of_a_dead_process_is_removed_by_the_next_notification(sender: Database, receiver: Database):
    dead = folder_of(sender) / "1-dead"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as abandoned:
        abandoned.bind(str(dead))
    assert dead.exists()
    with subscribed(receiver) as waiter:
        send(sender, "a")
        assert waiter.wait(LONG)
    assert not dead.exists()


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_only_its_user_may_send_to_the_sockets_of_a_process(receiver: Database):
    assert folder_of(receiver).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_full_buffer_of_a_stopped_process_delays_no_commit(sender: Database, receiver: Database):
    receiver.notifications.close()
    channel = receiver.notifications._channel
    with channel.receiver():  # nobody reads
        for _ in range(3000):
            sender.notifications.send_after_commit(["a"])


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_database_in_a_folder_with_a_long_path_has_a_channel(tmp_path: Path, database_url: str):
    folder = tmp_path / ("long" * 40)
    url = f"sqlite:///{folder}/tarn.db"
    with opened(url) as sender, listening(url) as receiver, subscribed(receiver) as waiter:
        send(sender, "a")
        assert waiter.wait(LONG)


def test_everything_is_a_topic_that_wakes_every_waiter(sender: Database):
    with subscribed(sender, "z") as waiter:
        sender.notifications.wake([EVERYTHING])
        assert waiter.wait(0)
