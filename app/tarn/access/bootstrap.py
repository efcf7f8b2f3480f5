"""Bootstrap of the administrator's tenant and first API key."""

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

GENERATED, CONFIGURED = "made at the first start", "set by TARN_ADMIN_KEY"
"""Labels of the bootstrap key, stored in SQL: they record where the key came from."""


def ensure_admin(database: Database, settings: Settings) -> str | None:
    """Ensure that the administrator has a key; return it if this call generated one, to be shown once.

    `TARN_ADMIN_KEY` is the key while it is set. Otherwise the key is in the key file, readable by its owner only, which
    is generated if there is no key yet or if `TARN_ADMIN_KEY` is no longer set. The file may be deleted once the key is
    noted. The file is written before the SQL row: after a crash between the two, the next start uses the file's key.

    Raises StartRefused if the file cannot be used, has no valid key, or is readable by others.
    """
    with database.write() as connection:
        database.serialize(connection, "admin")
        _ensure_tenant(connection)
        origin = connection.execute(select(api_keys.c.label).where(api_keys.c.id == BOOTSTRAP_KEY)).scalar()
        if settings.admin_key is not None:
            _set_key(connection, settings.admin_key.get_secret_value(), CONFIGURED, origin)
            return None
        path = settings.admin_key_file
        try:
            exists = path.exists()
            if origin == GENERATED and not exists:
                return None
            if not exists:
                _write_new_key(path)
            key = _read_key(path)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise StartRefused(f"TARN_ADMIN_KEY_FILE: {path} cannot be used: {reason}") from error
        _set_key(connection, key, GENERATED, origin)
        return None if origin is not None and exists else key


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
    """Write a new key to the file, atomically and durably."""
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
        pass  # a concurrent start with another database created the file: use its key
    finally:
        fresh.unlink()
    folder.sync([path.name])


def _read_key(path: Path) -> str:
    """Return the key in the file. Raises ValueError if it is invalid or readable by others than its owner."""
    if path.stat().st_mode & 0o077:
        raise ValueError("it is readable by others than its owner; run chmod 600 on it")
    return checked_admin_key(path.read_text())
