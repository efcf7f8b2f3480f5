"""The first key: how the first person gets in."""

import os
import secrets
from pathlib import Path

from sqlalchemy import Connection, insert, select, update

from tarn.access import keys
from tarn.access.revision import bump
from tarn.db.engine import Database
from tarn.db.tables import api_keys, grants, tenants
from tarn.errors import StartRefused
from tarn.model.ids import new_id, now
from tarn.model.tenant import ADMIN, BOOTSTRAP_KEY, Level
from tarn.settings import Settings, checked_admin_key
from tarn.storage.disk import Disk

MADE, SET = "made at the first start", "set by TARN_ADMIN_KEY"
"""The key's label, which remembers where it came from."""


def ensure_admin(database: Database, settings: Settings) -> str | None:
    """Make sure that the administrator has a key; return it if this call made one, to be shown once.

    `TARN_ADMIN_KEY` is that key while it is set. Otherwise it is the one in the key file, which only its owner can
    read, and which is made if there is no key yet or the last one was set and no longer is. Whoever has noted a made
    key may remove its file. The file comes before the row: a crash between the two leaves a file whose key the next
    start takes.

    Raises StartRefused for a file that cannot be used, or that holds no good key, or that others can read.
    """
    with database.write() as connection:
        database.serialize(connection, "admin")
        _ensure_tenant(connection)
        origin = connection.execute(select(api_keys.c.label).where(api_keys.c.id == BOOTSTRAP_KEY)).scalar()
        if settings.admin_key is not None:
            _set_key(connection, settings.admin_key.get_secret_value(), SET, origin)
            return None
        path = settings.admin_key_file
        try:
            there = path.exists()
            if origin == MADE and not there:
                return None
            if not there:
                _write_new_key(path)
            key = _read_key(path)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise StartRefused(f"TARN_ADMIN_KEY_FILE: {path} cannot be used: {reason}") from error
        _set_key(connection, key, MADE, origin)
        return None if origin is not None and there else key


def _ensure_tenant(connection: Connection) -> None:
    if connection.execute(select(tenants.c.name).where(tenants.c.name == ADMIN)).first() is not None:
        return
    connection.execute(
        insert(tenants).values(
            name=ADMIN, title="Administrator", created=now(), disabled=False, used_statements=0, used_bytes=0
        )
    )
    connection.execute(insert(grants).values(id=new_id(), tenant=ADMIN, dataset="*", level=Level.ADMIN, created=now()))


def _set_key(connection: Connection, key: str, label: str, origin: str | None) -> None:
    if origin is None:
        keys.insert_key(connection, BOOTSTRAP_KEY, ADMIN, label, key)
        return
    changed = update(api_keys).where(api_keys.c.id == BOOTSTRAP_KEY)
    connection.execute(changed.values(digest=keys.digest(key), label=label))
    bump(connection)


def _write_new_key(path: Path) -> None:
    """Put a new key into the file, which is made whole or not at all, and is on the disk when this returns."""
    folder = Disk(path.parent)
    folder.make()
    fresh = path.with_name(f".{path.name}.{new_id()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(fresh, path)
    except FileExistsError:
        pass  # another start was first, on a database of its own: its key is as good
    finally:
        fresh.unlink()
    folder.sync([path.name])


def _read_key(path: Path) -> str:
    """The key in the file. Raises ValueError if it is not good, or not for its owner alone."""
    if path.stat().st_mode & 0o077:
        raise ValueError("others than its owner can read it; chmod 600 makes it private")
    return checked_admin_key(path.read_text())
