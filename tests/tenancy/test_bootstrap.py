"""The first key."""

import stat
import threading

import pytest
from pydantic import SecretStr

from app.db.engine import Database
from app.errors import Unauthenticated
from app.settings import Settings
from app.tenancy import bootstrap
from app.tenancy.bootstrap import ensure_admin
from app.tenancy.identity import Authenticator


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
    own = settings.model_copy(update={"admin_key": SecretStr("the operator's own key")})

    shown = ensure_admin(database, own)
    with_own = _tenant(database, settings, "the operator's own key")
    with pytest.raises(Unauthenticated):
        _tenant(database, settings, made)
    ensure_admin(database, settings)

    assert shown is None
    assert with_own == "admin"
    assert _tenant(database, settings, made) == "admin"
    with pytest.raises(Unauthenticated):
        _tenant(database, settings, "the operator's own key")


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


def _tenant(database: Database, settings: Settings, key: str) -> str:
    return Authenticator(database, settings, None).identify(f"Bearer {key}").tenant
