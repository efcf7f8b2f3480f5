"""Notifications between processes: two `Database` objects on one database behave as two processes do."""

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import text
from tarn.db import notifications
from tarn.db.engine import Database
from tarn.db.notifications import EVERYTHING, SqliteChannel, Waiter, publish

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
        others = "pid <> pg_backend_pid() AND datname = current_database()"
        connection.execute(text(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}"))


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


def test_stop_ends_a_wait_at_once_also_if_the_channel_was_cut(database_url: str):
    with listening(database_url) as database:
        cut(database)
        began = time.monotonic()
        database.notifications.close()
    assert time.monotonic() - began < notifications.STOP_SECONDS


def test_waiter_can_be_woken_by_a_signal_handler_of_its_own_thread():
    waiter = Waiter()
    former = signal.signal(signal.SIGALRM, lambda *_: waiter.wake())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        woken = sum(waiter.wait(0.001) for _ in range(2000))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    assert woken > 0


def test_subscriber_that_fails_does_not_fail_the_commit(sender: Database):
    def fail() -> None:
        raise ZeroDivisionError

    with sender.notifications.subscribed(["a"], fail):
        send(sender, "a")


# PostgreSQL


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
@pytest.mark.parametrize("payload", ["x", "5", "null", "[[]]", "[" * 3000])
def test_message_of_an_unknown_form_wakes_everyone_and_later_ones_arrive(
    sender: Database, receiver: Database, payload: str
):
    with subscribed(receiver) as waiter, subscribed(receiver, "b") as other:
        with sender.write() as connection:
            connection.execute(text("SELECT pg_notify('tarn', :payload)"), {"payload": payload})
            publish(connection, "b")
        assert other.wait(LONG)
        send(sender, "a")
        assert waiter.wait(LONG)


# SQLite

SQLITE = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


@SQLITE
def test_socket_of_a_dead_process_is_removed_by_the_next_notification(sender: Database, receiver: Database):
    dead = folder_of(sender) / "1-00000000"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as abandoned:
        abandoned.bind(str(dead))
    assert dead.exists()
    with subscribed(receiver) as waiter:
        send(sender, "a")
        assert waiter.wait(LONG)
    assert not dead.exists()


@SQLITE
def test_other_files_in_the_folder_are_left_alone(sender: Database, receiver: Database):
    folder = folder_of(sender)
    (folder / "notes").write_text("a")
    (folder / "folder").mkdir()
    (folder / os.fsdecode(b"\xff")).write_text("b")
    names = {path.name for path in folder.iterdir()}
    with subscribed(receiver) as waiter:
        send(sender, "a")
        assert waiter.wait(LONG)
    assert {path.name for path in folder.iterdir()} == names


@SQLITE
@pytest.mark.parametrize("kind", ["open to others", "link", "file"])
def test_folder_that_others_could_have_made_is_not_used(sender: Database, tmp_path: Path, kind: str):
    folder, victim = folder_of(sender), tmp_path / "victim"
    victim.mkdir(mode=0o700)
    (victim / "1-00000000").write_text("important")
    if kind == "link":
        folder.symlink_to(victim)
    elif kind == "file":
        folder.write_text("")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with subscribed(sender) as waiter:
        send(sender, "a")
        assert waiter.wait(0)
    sender.notifications.listen()
    sender.notifications.close()
    assert (victim / "1-00000000").read_text() == "important"
    assert kind != "open to others" or list(folder.iterdir()) == []


@SQLITE
def test_only_its_user_may_send_to_the_sockets_of_a_process(receiver: Database):
    assert folder_of(receiver).stat().st_mode & 0o077 == 0


@SQLITE
def test_process_that_reads_nothing_delays_no_commit_and_no_other_process(sender: Database, receiver: Database):
    stuck = SqliteChannel(Path(str(sender.engine.url.database)))
    with ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(SqliteChannel(stuck._folder.with_name("tarn.db")).receiver())
        with subscribed(receiver) as waiter:
            for _ in range(50):
                send(sender, "a", "x" * 3000)
            assert waiter.wait(LONG)


@SQLITE
def test_more_messages_than_a_socket_holds_wake_everyone(sender: Database):
    channel = SqliteChannel(Path(str(sender.engine.url.database)))
    with channel.receiver() as receiver:
        for number in range(50):
            send(sender, f"topic-{number}")
        messages = receiver.read()
    assert messages == ['["*"]']


@SQLITE
def test_database_in_a_folder_with_a_long_path_has_a_channel(tmp_path: Path, database_url: str):
    folder = tmp_path / ("long" * 40)
    url = f"sqlite:///{folder}/tarn.db"
    with opened(url) as sender, listening(url) as receiver, subscribed(receiver) as waiter:
        send(sender, "a")
        assert waiter.wait(LONG)


@SQLITE
def test_database_opened_through_a_link_has_the_same_channel(tmp_path: Path, sender: Database):
    link = tmp_path / "link.db"
    link.symlink_to(str(sender.engine.url.database))
    with listening(f"sqlite:///{link}") as receiver, subscribed(receiver) as waiter:
        send(sender, "a")
        assert waiter.wait(LONG)


def test_everything_is_a_topic_that_wakes_every_waiter(sender: Database):
    with subscribed(sender, "z") as waiter:
        sender.notifications.wake([EVERYTHING])
        assert waiter.wait(0)
