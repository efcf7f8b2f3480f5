"""Mapping of store failures to Tarn's errors, without addresses or secrets in their details."""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from tarn.errors import PathExists, StorageFull, TarnError, Unavailable
from tarn.storage.connection import Connection

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
FULL_CODES = "|".join(str(code) for code in sorted(FULL))
FULL_TEXT = re.compile(rf"os error ({FULL_CODES})\b|InsufficientStorage|StorageFull|QuotaExceeded|status code: 507")
NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound|bucket does not exist")


class ObjectMissing(KeyError):
    """There is no object at this path. Internal: it is never an API error."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


@contextmanager
def translated(path: str, connection: Connection, target: str | None = None) -> Iterator[None]:
    """Translate errors of obstore and the disk into ObjectMissing (of `path`), PathExists (of `target`, or else of
    `path`), StorageFull or Unavailable. The cause is chained, with secrets removed from its text."""
    try:
        yield
    except FileNotFoundError as error:
        if NO_BUCKET.search(str(error)):
            raise Unavailable("the bucket or container of the lake does not exist") from None
        raise ObjectMissing(path) from None
    except (AlreadyExistsError, PreconditionError) as error:
        raise PathExists(f"{target or path} exists") from _redacted(error, connection)
    except (BaseError, OSError) as error:
        raise _unanswered(error) from _redacted(error, connection)


def _unanswered(error: Exception) -> TarnError:
    if (isinstance(error, OSError) and error.errno in FULL) or FULL_TEXT.search(str(error)):
        return StorageFull("the store has no space left")
    if isinstance(error, PermissionDeniedError | UnauthenticatedError | PermissionError):
        return Unavailable("the object store denies access: the operator must check credentials and permissions")
    return Unavailable("the object store does not respond")


def _redacted(error: Exception, connection: Connection) -> Exception:
    text = connection.redact(str(error))
    return error if text == str(error) else type(error)(text)
