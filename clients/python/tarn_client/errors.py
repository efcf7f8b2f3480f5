"""Why something did not work.

Exception
└── LakeError
    ├── Problem         the server refused, and says why (RFC 9457)
    ├── Unreachable     no server answered, though it was asked again for as long as patience lasts
    └── BrokenOff       an answer ended before its end: what came of it is not the whole

Warning
└── UserWarning
    └── InvalidEntitiesWarning   entities are left out, as their statements do not assemble
"""

from typing import Any


class LakeError(Exception):
    """What goes wrong between here and a lake."""


class Problem(LakeError):
    """The server's refusal. `slug` is its kind, such as `dataset-not-found`; `errors` are the records at fault."""

    def __init__(self, document: dict[str, Any], retry_after: float | None = None) -> None:
        self.document = document
        self.slug = str(document.get("type", "about:blank")).rsplit("/", 1)[-1]
        self.status = int(document.get("status", 0))
        self.retryable = bool(document.get("retryable", False))
        self.errors: list[dict[str, Any]] = document.get("errors") or []
        self.retry_after = retry_after
        super().__init__(document.get("detail") or document.get("title") or self.slug)

    def __str__(self) -> str:
        return f"{super().__str__()} ({self.slug})"


class Unreachable(LakeError):
    """No server answers. Whether a write was made is not known; sent again under its key it is made once."""


class BrokenOff(LakeError):
    """A stream ended before its end."""


class InvalidEntitiesWarning(UserWarning):
    """Entities are left out of what was read or exported, as their statements do not assemble."""
