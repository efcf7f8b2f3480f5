"""The first key: how the first person gets in."""

import os
import secrets
from pathlib import Path

from sqlalchemy import Connection, insert, select, update

from app.db.engine import Database
from app.db.tables import api_keys, grants, tenants
from app.model.ids import new_id, now
from app.model.tenant import ADMIN, BOOTSTRAP_KEY, Level
from app.settings import Settings
from app.tenancy import keys


def ensure_admin(database: Database, settings: Settings) -> str | None:
    """Make sure that the administrator has a key; return it if this call made one, to be shown once.

    `TARN_ADMIN_KEY` is that key while it is set. Otherwise one is made where there is none, and kept in a file that
    only its owner can read. The file comes before the row: a crash between the two leaves a file whose key the
    next start takes.
    """
    with database.write() as connection:
        database.serialize(connection, "admin")
        _ensure_tenant(connection)
        known = connection.execute(select(api_keys.c.id).where(api_keys.c.id == BOOTSTRAP_KEY)).first() is not None
        if settings.admin_key is not None:
            _set_key(connection, settings.admin_key.get_secret_value(), known)
            return None
        if known and not settings.admin_key_file.exists():
            return None
        key = _kept_key(settings.admin_key_file)
        _set_key(connection, key, known)
        return None if known else key


def _ensure_tenant(connection: Connection) -> None:
    if connection.execute(select(tenants.c.name).where(tenants.c.name == ADMIN)).first() is not None:
        return
    connection.execute(
        insert(tenants).values(
            name=ADMIN, title="Administrator", created=now(), disabled=False, used_statements=0, used_bytes=0
        )
    )
    connection.execute(insert(grants).values(id=new_id(), tenant=ADMIN, dataset="*", level=Level.ADMIN, created=now()))


def _set_key(connection: Connection, key: str, known: bool) -> None:
    if known:
        connection.execute(update(api_keys).where(api_keys.c.id == BOOTSTRAP_KEY).values(digest=keys.digest(key)))
    else:
        keys.insert_key(connection, BOOTSTRAP_KEY, ADMIN, "made at the first start", key)


def _kept_key(path: Path) -> str:
    """The key in the file, which is made whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{new_id()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_urlsafe(32) + "\n")
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(fresh, path)
    except FileExistsError:
        pass  # a start that died before it wrote the row: its key is as good
    finally:
        fresh.unlink()
    return path.read_text().strip()
