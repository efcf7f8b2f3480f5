"""Documents of the lake: read whole or refused, and replaced by who holds the lock on them."""

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
    """What a document says, and its bytes. Raises Missing, and DocumentInvalid whatever is wrong with it."""
    text = store.get(path)
    try:
        return parse(text), text
    except Exception as error:
        # What was edited by hand can bring a parser to nearly any error: no such date, brackets without end, a tag.
        log.exception("unreadable document", path=path)
        raise DocumentInvalid(f"{path} in the lake cannot be read") from error


def replace_document(connection: Connection, store: Store, path: str, former: Versions, text: bytes) -> None:
    """Replace a document while this connection's transaction holds the lock on it; the former text is kept."""
    versions.replace(store, path, former, text, now(), check=lambda: require_alive(connection))


def require_alive(connection: Connection) -> None:
    """Raise Unavailable if the connection is dead: what it held, somebody else may hold by now."""
    connection.execute(select(1))
