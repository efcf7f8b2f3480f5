"""Read and replace configuration documents in the lake."""

from collections.abc import Callable
from typing import TypeVar

import structlog
from sqlalchemy import Connection, select

from tarn.errors import DocumentInvalid
from tarn.model.ids import now
from tarn.storage import versions
from tarn.storage.layout import Versions
from tarn.storage.store import Store

log = structlog.get_logger(__name__)

Parsed = TypeVar("Parsed")


def read_document(store: Store, path: str, parse: Callable[[bytes], Parsed]) -> tuple[Parsed, bytes]:
    """Return a parsed document and its bytes. Raises ObjectMissing, and DocumentInvalid for any parser error."""
    text = store.get(path)
    try:
        return parse(text), text
    except Exception as error:
        # A document edited by hand can cause nearly any parser error: invalid dates, deep nesting, YAML tags.
        log.exception("unreadable document", path=path)
        raise DocumentInvalid(f"{path} in the lake cannot be read") from error


def replace_document(connection: Connection, store: Store, path: str, former: Versions, text: bytes) -> None:
    """Replace a document while this connection's transaction holds its lock; the former text is kept as a version."""
    versions.replace(store, path, former, text, now(), check=lambda: require_alive(connection))


def require_alive(connection: Connection) -> None:
    """Raise Unavailable if the connection is dead: another process may hold its lock by now."""
    connection.execute(select(1))
