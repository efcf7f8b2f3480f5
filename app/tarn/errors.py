"""Everything that can go wrong, as one tree and one closed list.

    Exception
    ├── StartRefused            the process must not start; one sentence for its operator
    │   └── UnsupportedStore
    └── TarnError               answered as RFC 9457 application/problem+json
        ├── NotFound            …-not-found, one class per noun
        ├── Limited             429, always with Retry-After
        └── …                   one class per slug, below

A class is a problem type: its slug, its status, whether trying again can help, the members it adds to the
problem, and (`model()`) the OpenAPI schema of all that. Its docstring's first sentence is the problem's title.
"""

import re
from functools import cache
from typing import Any, ClassVar, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, create_model


class StartRefused(Exception):
    """The process cannot start as it is configured; the message says in one sentence what to change."""


class UnsupportedStore(StartRefused):
    """The object store does not keep a promise that commits rest on."""


class Fault(BaseModel):
    """One thing that is wrong with a request: where it is and why."""

    line: int | None = None
    field: str | None = None
    reason: str


class Problem(BaseModel):
    """What every error answer holds (RFC 9457)."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    detail: str
    instance: str
    retryable: bool


class TarnError(Exception):
    """An error with an answer. Annotations of a subclass are members of its problem, passed by keyword."""

    slug: ClassVar[str]
    status: ClassVar[int]
    retryable: ClassVar[bool] = False
    wait: ClassVar[int | None] = None
    """Seconds in `Retry-After` when who raises it knows no better; None sends none."""

    def __init__(self, detail: str, *, retry_after: int | None = None, **members: Any) -> None:
        super().__init__(detail)
        self.detail = detail
        self.retry_after = self.wait if retry_after is None else retry_after
        unknown = members.keys() - self.member_types().keys()
        if unknown:
            raise TypeError(f"{type(self).__name__} has no member {', '.join(sorted(unknown))}")
        self.members = members

    @classmethod
    def title(cls) -> str:
        return re.split(r"\.(?=\s|$)", cls.__doc__ or "", maxsplit=1)[0].strip()

    @classmethod
    def type_uri(cls) -> str:
        return f"/problems/{cls.slug}"

    @classmethod
    def member_types(cls) -> dict[str, Any]:
        """The problem's own members: annotations that are not class variables."""
        return {name: kind for name, kind in get_type_hints(cls).items() if "ClassVar" not in str(kind)}

    @classmethod
    @cache
    def model(cls) -> type[Problem]:
        """The OpenAPI schema of this problem: the common fields, fixed where the class fixes them, and its own."""
        fixed: dict[str, Any] = {
            "type": (Literal[cls.type_uri()], ...),
            "status": (Literal[cls.status], ...),
            "retryable": (Literal[cls.retryable], ...),
        }
        fields: Any = fixed | {name: (kind, ...) for name, kind in cls.member_types().items()}
        model: type[Problem] = create_model(
            f"{cls.__name__}Problem", __base__=Problem, __doc__=cls.__doc__, __module__=cls.__module__, **fields
        )
        return model

    def problem(self, instance: str) -> Problem:
        return self.model()(
            type=self.type_uri(),
            title=self.title(),
            status=self.status,
            detail=self.detail,
            instance=instance,
            retryable=self.retryable,
            **self.members,
        )


# Requests that cannot be understood


class InvalidFormat(TarnError):
    """The body or a parameter is not in the form it claims. Nothing was changed."""

    slug, status = "invalid-format", 400
    errors: list[Fault]


class EmptyBody(TarnError):
    """The request needs a body and has none."""

    slug, status = "empty-body", 400


class InvalidPath(TarnError):
    """The path is not one that may be stored."""

    slug, status = "invalid-path", 400


class SchemaViolation(TarnError):
    """The request is well formed and not valid: each fault has its line, field and reason. Nothing was changed."""

    slug, status = "schema-violation", 422
    errors: list[Fault]


class BodyTooLarge(TarnError):
    """The body, decompressed, is larger than this route takes."""

    slug, status = "body-too-large", 413
    limit: int


class BodyTimeout(TarnError):
    """The body did not arrive in time: no byte for too long, or fewer than the minimum rate. Nothing was stored."""

    slug, status, retryable = "body-timeout", 408, True


class UnsupportedMediaType(TarnError):
    """The body's type or encoding is not one this route takes."""

    slug, status = "unsupported-media-type", 415
    supported: list[str]


class CodecConfigured(TarnError):
    """A raw byte stream was sent to a route that takes records."""

    slug, status = "codec-configured", 415


class CodecNotStreamable(TarnError):
    """Records were sent in a form that cannot be read as a stream."""

    slug, status = "codec-not-streamable", 415


class NotAcceptable(TarnError):
    """No form that the caller accepts can be served."""

    slug, status = "not-acceptable", 406
    supported: list[str]


class IdempotencyMismatch(TarnError):
    """This idempotency key was used for another request."""

    slug, status = "idempotency-mismatch", 422


# Identity


class Unauthenticated(TarnError):
    """A valid API key or token is needed."""

    slug, status = "unauthenticated", 401

    def __init__(self, detail: str, *, key: str | None = None) -> None:
        super().__init__(detail)
        # Which key was refused, if there is such a key: for the audit log, and never in the answer.
        self.key = key


class Forbidden(TarnError):
    """The caller's grants do not reach this far."""

    slug, status = "forbidden", 403


# Things that are not there


class NotFound(TarnError):
    """What was asked for does not exist, or not for this caller."""

    status = 404


class RouteNotFound(NotFound):
    """There is no such route."""

    slug = "route-not-found"


class MethodNotAllowed(TarnError):
    """The route does not take this method."""

    slug, status = "method-not-allowed", 405
    allowed: list[str]


class DatasetNotFound(NotFound):
    """There is no such dataset."""

    slug = "dataset-not-found"


class EntityNotFound(NotFound):
    """There is no such entity."""

    slug = "entity-not-found"


class StatementNotFound(NotFound):
    """There is no such statement."""

    slug = "statement-not-found"


class FileNotFound(NotFound):
    """There is no such file."""

    slug = "file-not-found"


class StageNotFound(NotFound):
    """There is no such stage."""

    slug = "stage-not-found"


class UploadNotFound(NotFound):
    """There is no such upload."""

    slug = "upload-not-found"


class MappingNotFound(NotFound):
    """There is no such mapping."""

    slug = "mapping-not-found"


class JobNotFound(NotFound):
    """There is no such job."""

    slug = "job-not-found"


class RefNotFound(NotFound):
    """There is no such ref."""

    slug = "ref-not-found"


class TagNotFound(NotFound):
    """There is no such tag."""

    slug = "tag-not-found"


class QueueItemNotFound(NotFound):
    """There is no such queue item."""

    slug = "queue-item-not-found"


class LockNotFound(NotFound):
    """There is no such lock."""

    slug = "lock-not-found"


class TenantNotFound(NotFound):
    """There is no such tenant."""

    slug = "tenant-not-found"


class KeyNotFound(NotFound):
    """There is no such key."""

    slug = "key-not-found"


class GrantNotFound(NotFound):
    """There is no such grant."""

    slug = "grant-not-found"


class WebhookNotFound(NotFound):
    """There is no such webhook."""

    slug = "webhook-not-found"


class VersionNotFound(NotFound):
    """There is no such version."""

    slug = "version-not-found"


class ProblemNotFound(NotFound):
    """There is no such type of problem."""

    slug = "problem-not-found"


class ExportMissing(NotFound):
    """This export was never made."""

    slug = "export-missing"


class NoSnapshots(NotFound):
    """The dataset has no snapshot yet."""

    slug = "no-snapshots"


class SnapshotNotFound(NotFound):
    """There is no such snapshot."""

    slug = "snapshot-not-found"


class SnapshotGone(TarnError):
    """The snapshot was there and has been vacuumed away."""

    slug, status = "snapshot-gone", 410


# Conflicts


class AlreadyExists(TarnError):
    """Something of this name is there already."""

    slug, status = "already-exists", 409


class PathExists(TarnError):
    """The key exists and is never overwritten."""

    slug, status = "path-exists", 409


class SnapshotConflict(TarnError):
    """Another writer committed first. Read the head again, rebuild on it, retry."""

    slug, status, retryable = "snapshot-conflict", 409, True
    expected: str | None
    head: str | None


class PreconditionFailed(TarnError):
    """What `If-Match` names is no longer what is there, or what `If-None-Match` names is."""

    slug, status = "precondition-failed", 412
    expected: str
    head: str | None


class RangeMissing(TarnError):
    """Parts of the upload have not arrived."""

    slug, status = "range-missing", 409


class RangeNotSatisfiable(TarnError):
    """The part of the file that is asked for does not exist."""

    slug, status = "range-not-satisfiable", 416
    size: int


class OverlappingBlocks(TarnError):
    """A block overlaps one that has arrived already."""

    slug, status = "overlapping-blocks", 409


class ComponentMismatch(TarnError):
    """The dataset was written with other components than these."""

    slug, status = "component-mismatch", 409


class StageClosed(TarnError):
    """The stage is committed, aborted or expired."""

    slug, status = "stage-closed", 409


class JobConflict(TarnError):
    """The job's state does not allow this."""

    slug, status = "job-conflict", 409
    state: str


class QueueItemConflict(TarnError):
    """The queue item's state does not allow this."""

    slug, status = "queue-item-conflict", 409
    state: str


class Locked(TarnError):
    """Somebody else holds the lock."""

    slug, status = "locked", 409
    holder: str


class LockLost(TarnError):
    """The lock is no longer held under this token."""

    slug, status = "lock-lost", 409


# Limits


class Limited(TarnError):
    """The caller is over a limit."""

    status, retryable, wait = 429, True, 1


class RateLimited(Limited):
    """Too many requests."""

    slug = "rate-limited"


class QuotaExceeded(Limited):
    """The tenant's quota is used up."""

    slug = "quota-exceeded"


class Backpressure(Limited):
    """The journal is full; the flush is catching up."""

    slug = "backpressure"


# Our side


class ManifestInvalid(TarnError):
    """A stored manifest lacks what it must have."""

    slug, status = "manifest-invalid", 500
    field: str


class DocumentInvalid(TarnError):
    """A stored document, such as a `config.yml` edited by hand, cannot be read."""

    slug, status = "document-invalid", 500


class StorageFull(TarnError):
    """The store has no room left."""

    slug, status = "storage-full", 507


class SourceFailed(TarnError):
    """The source that was to be fetched did not give it, or not all of it. Nothing was stored."""

    slug, status, retryable = "source-failed", 502, True


class QueueItemFailed(TarnError):
    """Whoever took the queue item could not do it, or never said that it did."""

    slug, status = "queue-item-failed", 502


class Unavailable(TarnError):
    """The database or the object store does not answer."""

    slug, status, retryable, wait = "unavailable", 503, True, 2


class QueryTimeout(TarnError):
    """The query ran longer than a query may, and was stopped. Narrow it; sent again as it is, it is stopped again."""

    slug, status = "query-timeout", 504
    seconds: float


class Internal(TarnError):
    """Something went wrong on the server. The request id finds it in the logs."""

    slug, status = "internal", 500


def problem_types() -> dict[str, type[TarnError]]:
    """Every problem there is, by slug."""

    def leaves(cls: type[TarnError]) -> list[type[TarnError]]:
        found = [cls] if "slug" in vars(cls) else []
        return found + [leaf for child in cls.__subclasses__() for leaf in leaves(child)]

    return {cls.slug: cls for cls in sorted(leaves(TarnError), key=lambda cls: cls.slug)}
