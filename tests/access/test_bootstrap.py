"""The first administrator key."""

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


def test_first_start_creates_a_key_logs_it_once_and_stores_it_readable_by_its_owner_only(
    database: Database, settings: Settings
):
    first, second = ensure_admin(database, settings), ensure_admin(database, settings)

    path = settings.admin_key_file
    assert first is not None
    assert second is None
    assert path.read_text().strip() == first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert _tenant(database, settings, first) == "admin"


def test_key_set_by_the_operator_replaces_the_generated_one_while_it_is_set(database: Database, settings: Settings):
    created = ensure_admin(database, settings)
    assert created is not None
    own = settings.model_copy(update={"admin_key": SecretStr("the-operators-own-key")})

    shown = ensure_admin(database, own)
    with_own = _tenant(database, settings, "the-operators-own-key")
    with pytest.raises(Unauthenticated):
        _tenant(database, settings, created)
    ensure_admin(database, settings)

    assert shown is None
    assert with_own == "admin"
    assert _tenant(database, settings, created) == "admin"
    with pytest.raises(Unauthenticated):
        _tenant(database, settings, "the-operators-own-key")


def test_start_that_crashed_between_file_and_row_is_completed_by_the_next(
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


def test_concurrent_first_starts_agree_on_one_key(settings: Settings):
    created: list[str | None] = []

    def start() -> None:
        database = Database(settings.database_url)
        created.append(ensure_admin(database, settings))
        database.close()

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(created) == 6
    assert [key for key in created if key is not None] == [settings.admin_key_file.read_text().strip()]


def test_key_set_by_the_operator_is_invalid_when_it_is_no_longer_set(database: Database, settings: Settings):
    ensure_admin(database, settings.model_copy(update={"admin_key": SecretStr("the-operators-own-key")}))

    created = ensure_admin(database, settings)

    assert created is not None
    assert settings.admin_key_file.read_text().strip() == created
    assert _tenant(database, settings, created) == "admin"
    with pytest.raises(Unauthenticated):
        _tenant(database, settings, "the-operators-own-key")


def test_generated_key_is_valid_after_its_file_is_deleted(database: Database, settings: Settings):
    created = ensure_admin(database, settings)
    settings.admin_key_file.unlink()

    assert ensure_admin(database, settings) is None
    assert not settings.admin_key_file.exists()
    assert _tenant(database, settings, str(created)) == "admin"


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
def test_key_file_that_is_malformed_or_readable_by_others_stops_the_start(
    database: Database, settings: Settings, content: bytes, mode: int, sentence: str
):
    settings.admin_key_file.write_bytes(content)
    settings.admin_key_file.chmod(mode)

    with pytest.raises(StartRefused, match=f"^TARN_ADMIN_KEY_FILE: .*{sentence}"):
        ensure_admin(database, settings)


@pytest.mark.parametrize("path", ["/proc/nope/key", "/proc", "/dev/null/key"])
def test_key_file_that_cannot_be_created_stops_the_start(database: Database, settings: Settings, path: str):
    with pytest.raises(StartRefused, match=f"^TARN_ADMIN_KEY_FILE: {path} cannot be used"):
        ensure_admin(database, settings.model_copy(update={"admin_key_file": Path(path)}))


def test_generated_key_and_its_folder_are_synced_before_the_row_is_written(
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
