"""Exceptions and warnings of the client.

Exception
└── LakeError
    ├── InvalidRequest  the URL, key, name or body cannot be sent; no request was made
    ├── Problem         the server refused, with the reason (RFC 9457)
    ├── JobCancelled    the job that the client waited for was cancelled
    ├── Unreachable     no complete response, although the request was retried for `retry_timeout` seconds
    └── IncompleteResponse       a stream ended early: the data received so far is incomplete

Warning
└── UserWarning
    └── InvalidEntitiesWarning   entities were left out because their statements do not assemble
"""

from typing import Any


class LakeError(Exception):
    """Base class of the client's exceptions."""


class InvalidRequest(LakeError, ValueError):
    """The arguments cannot be sent. No request was made."""


class Problem(LakeError):
    """The server refused. `slug` is the kind, such as `dataset-not-found`; `errors` lists the invalid records."""

    def __init__(self, document: dict[str, Any], retry_after: float | None = None) -> None:
        self.document = document
        self.slug = str(document.get("type", "about:blank")).rsplit("/", 1)[-1]
        self.status = int(document.get("status", 0))
        self.retryable = bool(document.get("retryable", False))
        self.errors: list[dict[str, Any]] = document.get("errors") or []
        self.retry_after = retry_after
        self.detail = str(document.get("detail") or document.get("title") or self.slug)
        super().__init__(self.detail)

    def __str__(self) -> str:
        return f"{self.detail} ({self.slug})"


class JobCancelled(LakeError):
    """The job was cancelled before it finished."""


class Unreachable(LakeError):
    """No complete response. Unless `connected` is false, it is unknown whether a write was executed."""

    def __init__(self, message: str, connected: bool = True) -> None:
        self.connected = connected
        super().__init__(message)


class IncompleteResponse(LakeError):
    """A stream ended early."""


class InvalidEntitiesWarning(UserWarning):
    """Entities were left out of a read or an export because their statements do not assemble."""
