"""The first key."""

import os
import stat
import threading
from pathlib import Path

import pytest
from pydantic import SecretStr
from tarn.access import bootstrap
from tarn.access.bootstrap import ensure_admin
from tarn.access.identity import Authenticator
from tarn.db.engine import Database
from tarn.errors import StartRefused, Unauthenticated
from tarn.settings import Settings


def test_first_start_makes_a_key_shows_it_once_and_keeps_it_for_its_owner_alone(database: Database, settings: Settings):
    first, second = ensure_admin(database, settings), ensure_admin(database, settings)

    path = settings.admin_key_file
    assert first is not None
    assert second is None
    assert path.read_text().strip() == first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert _tenant(database, settings, first) == "admin"


def test_key_set_by_the_operator_replaces_the_made_one_while_it_is_set(database: Database, settings: Settings):
    made = ensure_admin(database, settings)
    assert made is not None
    own = settings.model_copy(update={"admin_key": SecretStr("the-operators-own-key")})

    shown = ensure_admin(database, own)
    with_own = _tenant(database, settings, "the-operators-own-key")
    with pytest.raises(Unauthenticated):
        _tenant(database, settings, made)
    ensure_admin(database, settings)

    assert shown is None
    assert with_own == "admin"
    assert _tenant(database, settings, made) == "admin"
    with pytest.raises(Unauthenticated):
        _tenant(database, settings, "the-operators-own-key")


def test_start_that_died_between_file_and_row_is_taken_up(
    database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
):
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as dying:
        dying.setattr(bootstrap, "_set_key", die)
        with pytest.raises(KeyboardInterrupt):
            ensure_admin(database, settings)
    left = settings.admin_key_file.read_text().strip()

    assert ensure_admin(database, settings) == left
    assert _tenant(database, settings, left) == "admin"


def test_many_first_starts_at_once_agree_on_one_key(settings: Settings):
    made: list[str | None] = []

    def start() -> None:
        database = Database(settings.database_url)
        made.append(ensure_admin(database, settings))
        database.close()

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(made) == 6
    assert [key for key in made if key is not None] == [settings.admin_key_file.read_text().strip()]


def test_key_set_by_the_operator_ends_when_it_is_no_longer_set(database: Database, settings: Settings):
    ensure_admin(database, settings.model_copy(update={"admin_key": SecretStr("the-operators-own-key")}))

    made = ensure_admin(database, settings)

    assert made is not None
    assert settings.admin_key_file.read_text().strip() == made
    assert _tenant(database, settings, made) == "admin"
    with pytest.raises(Unauthenticated):
        _tenant(database, settings, "the-operators-own-key")


def test_made_key_outlives_its_file(database: Database, settings: Settings):
    made = ensure_admin(database, settings)
    settings.admin_key_file.unlink()

    assert ensure_admin(database, settings) is None
    assert not settings.admin_key_file.exists()
    assert _tenant(database, settings, str(made)) == "admin"


@pytest.mark.parametrize(
    ("content", "mode", "sentence"),
    [
        (b"", 0o600, "at least 16 characters"),
        (b"short\n", 0o600, "at least 16 characters"),
        (b"tarn_abcdefgh_ijklmnop\n", 0o600, "must not start with tarn_"),
        (b"\xff" * 40, 0o600, "codec"),
        (b"a-key-that-is-long-enough\n", 0o640, "chmod 600"),
        (b"a-key-that-is-long-enough\n", 0o604, "chmod 600"),
    ],
)
def test_key_file_with_no_good_key_or_for_everybody_stops_the_start(
    database: Database, settings: Settings, content: bytes, mode: int, sentence: str
):
    settings.admin_key_file.write_bytes(content)
    settings.admin_key_file.chmod(mode)

    with pytest.raises(StartRefused, match=f"^TARN_ADMIN_KEY_FILE: .*{sentence}"):
        ensure_admin(database, settings)


@pytest.mark.parametrize("path", ["/proc/nope/key", "/proc", "/dev/null/key"])
def test_key_file_that_cannot_be_made_stops_the_start(database: Database, settings: Settings, path: str):
    with pytest.raises(StartRefused, match=f"^TARN_ADMIN_KEY_FILE: {path} cannot be used"):
        ensure_admin(database, settings.model_copy(update={"admin_key_file": Path(path)}))


def test_made_key_and_its_folder_are_on_the_disk_before_the_row(
    database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
):
    synced: list[int] = []
    fsync = os.fsync
    path = settings.admin_key_file

    def note(file: int) -> None:
        synced.append(os.fstat(file).st_ino)
        fsync(file)

    monkeypatch.setattr(os, "fsync", note)

    ensure_admin(database, settings)

    assert {path.stat().st_ino, path.parent.stat().st_ino} <= set(synced)


def _tenant(database: Database, settings: Settings, key: str) -> str:
    with Authenticator(database, settings, None).identified(f"Bearer {key}") as sight:
        return sight.identity.tenant
