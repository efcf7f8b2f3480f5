"""Connection of a client command to its server: which key it uses, and what to do if there is no response."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from tarn_client.errors import Problem, Unreachable

from tarn.cli.failures import Misuse

if TYPE_CHECKING:
    from tarn_client.connection import Connection

DEFAULT_URL = "http://127.0.0.1:8000"
DATASETS = "/v1/datasets"
ADMIN_KEY_FILE = "data/admin.key"
"""Default path, relative to the working directory, of the administrator's key of a local server."""

TIMEOUT = 60.0
LONG_TIMEOUT = 600.0
"""Read timeout for large bodies: until the first byte of a response, or after the last byte of a request."""

NO_KEY = "no key was sent: set TARN_KEY, or run the command in the folder that contains data/admin.key"
NO_SERVER = "start a server with make run or tarn serve, or name another one with --url"


@contextmanager
def connected(url: str, key: str | None) -> Iterator["Connection"]:
    """Open a connection that retries nothing. Errors that a setting can solve get a note that names it.

    Raises Misuse if the key cannot be read, and LakeError.
    """
    # Late import: httpx takes longer than everything else that a command needs, and --help needs none.
    from tarn_client.connection import Connection

    key = find_key(url, key)
    with Connection(url, key, retry_timeout=0, timeout=TIMEOUT, user_agent=f"tarn/{version('tarn')}") as connection:
        try:
            yield connection
        except Problem as problem:
            if problem.status == 401 and not key:
                problem.add_note(NO_KEY)
            raise
        except Unreachable as failure:
            if not failure.connected:
                failure.add_note(NO_SERVER)
            raise


def find_key(url: str, key: str | None) -> str | None:
    """Return the given key; for a server on this machine otherwise its administrator's, which no other may receive."""
    from tarn_client.connection import is_loopback

    return key or (_admin_key() if is_loopback(url) else None)


def _admin_key() -> str | None:
    if key := os.environ.get("TARN_ADMIN_KEY", "").strip():
        return key
    path = Path(os.environ.get("TARN_ADMIN_KEY_FILE") or ADMIN_KEY_FILE)
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise Misuse(f"the key in {path} cannot be read, give one with TARN_KEY: {error}") from None
