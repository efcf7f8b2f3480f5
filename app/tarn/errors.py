"""Exception classes and problem types (RFC 9457): the complete list.

    Exception
    ├── StartRefused            the process must not start; the message is one sentence for the operator
    │   └── UnsupportedStore
    └── TarnError               returned as RFC 9457 application/problem+json
        ├── NotFound            …-not-found, one class per kind of resource
        ├── Limited             429, always with Retry-After
        └── …                   one class per slug, below

A class is a problem type: its slug, its status, whether a retry can succeed, the members it adds to the problem, and
(`model()`) its OpenAPI schema. The first sentence of its docstring is the problem's title.
"""

import re
from functools import cache
from typing import Any, ClassVar, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, create_model


class StartRefused(Exception):
    """The process cannot start with its configuration; the message says in one sentence what to change."""


class UnsupportedStore(StartRefused):
    """The object store lacks a guarantee that commits depend on."""


class FieldError(BaseModel):
    """One validation error of a request: its location and its reason."""

    line: int | None = None
    field: str | None = None
    reason: str


class Problem(BaseModel):
    """The members of every error response (RFC 9457)."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    detail: str
    instance: str
    retryable: bool


class TarnError(Exception):
    """An error that is returned as a problem. Annotations of a subclass are its members, passed by keyword."""

    slug: ClassVar[str]
    status: ClassVar[int]
    retryable: ClassVar[bool] = False
    wait: ClassVar[int | None] = None
    """Default of `Retry-After` in seconds, if the raising code passes none; None: the header is not sent."""

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
        """Return the problem's own members with their types: annotations that are not class variables."""
        return {name: kind for name, kind in get_type_hints(cls).items() if "ClassVar" not in str(kind)}

    @classmethod
    @cache
    def model(cls) -> type[Problem]:
        """Return the OpenAPI schema: the common fields, as literals where the class fixes them, and its own members."""
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


# Invalid requests


class InvalidFormat(TarnError):
    """The body or a parameter cannot be parsed. Nothing was changed."""

    slug, status = "invalid-format", 400
    errors: list[FieldError]


class EmptyBody(TarnError):
    """The request requires a body and has none."""

    slug, status = "empty-body", 400


class InvalidPath(TarnError):
    """The path is not a valid file path."""

    slug, status = "invalid-path", 400


class SchemaViolation(TarnError):
    """Validation of the request failed: each error has its line, field and reason. Nothing was changed."""

    slug, status = "schema-violation", 422
    errors: list[FieldError]


class BodyTooLarge(TarnError):
    """The decompressed body is larger than this route accepts."""

    slug, status = "body-too-large", 413
    limit: int


class BodyTimeout(TarnError):
    """The body did not arrive in time: no byte for too long, or fewer than the minimum rate. Nothing was stored."""

    slug, status, retryable = "body-timeout", 408, True


class UnsupportedMediaType(TarnError):
    """This route does not support the body's media type or encoding."""

    slug, status = "unsupported-media-type", 415
    supported: list[str]


class CodecConfigured(TarnError):
    """A raw byte stream was sent to a route that accepts records."""

    slug, status = "codec-configured", 415


class CodecNotStreamable(TarnError):
    """Records were sent in a format that cannot be read as a stream."""

    slug, status = "codec-not-streamable", 415


class NotAcceptable(TarnError):
    """None of the media types that the client accepts is available."""

    slug, status = "not-acceptable", 406
    supported: list[str]


class IdempotencyMismatch(TarnError):
    """This idempotency key was used for a different request."""

    slug, status = "idempotency-mismatch", 422


# Identity


class Unauthenticated(TarnError):
    """A valid API key or token is required."""

    slug, status = "unauthenticated", 401

    def __init__(self, detail: str, *, key: str | None = None) -> None:
        super().__init__(detail)
        # The id of the refused key, if it exists: for the audit log only, never in the response.
        self.key = key


class Forbidden(TarnError):
    """The caller's grants do not allow this."""

    slug, status = "forbidden", 403


# Resources that do not exist


class NotFound(TarnError):
    """The resource does not exist, or the caller may not see it."""

    status = 404


class RouteNotFound(NotFound):
    """There is no such route."""

    slug = "route-not-found"


class MethodNotAllowed(TarnError):
    """The route does not support this method."""

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
    """There is no such problem type."""

    slug = "problem-not-found"


class ExportMissing(NotFound):
    """This export does not exist yet."""

    slug = "export-missing"


class NoSnapshots(NotFound):
    """The dataset has no snapshot yet."""

    slug = "no-snapshots"


class SnapshotNotFound(NotFound):
    """There is no such snapshot."""

    slug = "snapshot-not-found"


class SnapshotGone(TarnError):
    """The snapshot has expired and was removed by a vacuum."""

    slug, status = "snapshot-gone", 410


# Conflicts


class AlreadyExists(TarnError):
    """A resource with this name exists already."""

    slug, status = "already-exists", 409


class PathExists(TarnError):
    """The key exists, and existing keys are never overwritten."""

    slug, status = "path-exists", 409


class SnapshotConflict(TarnError):
    """Another writer committed first. Read the head again, rebuild on it, retry."""

    slug, status, retryable = "snapshot-conflict", 409, True
    expected: str | None
    head: str | None


class PreconditionFailed(TarnError):
    """The current entity tag does not satisfy `If-Match` or `If-None-Match`."""

    slug, status = "precondition-failed", 412
    expected: str
    head: str | None


class RangeMissing(TarnError):
    """Parts of the upload are missing."""

    slug, status = "range-missing", 409


class RangeNotSatisfiable(TarnError):
    """The requested range is outside the file."""

    slug, status = "range-not-satisfiable", 416
    size: int


class OverlappingBlocks(TarnError):
    """The block overlaps a block that was uploaded already."""

    slug, status = "overlapping-blocks", 409


class ComponentMismatch(TarnError):
    """The dataset was written with different components."""

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
    """The lock is held by another holder."""

    slug, status = "locked", 409
    holder: str


class LockLost(TarnError):
    """The lock is no longer held under this token."""

    slug, status = "lock-lost", 409


# Limits


class Limited(TarnError):
    """The caller has exceeded a limit."""

    status, retryable, wait = 429, True, 1


class RateLimited(Limited):
    """Too many requests."""

    slug = "rate-limited"


class QuotaExceeded(Limited):
    """The tenant's quota is used up."""

    slug = "quota-exceeded"


class Backpressure(Limited):
    """The journal has too many unflushed statements. Retry after the next flush."""

    slug = "backpressure"


# Server errors


class ManifestInvalid(TarnError):
    """A stored manifest has a missing or invalid field."""

    slug, status = "manifest-invalid", 500
    field: str


class DocumentInvalid(TarnError):
    """A stored document, such as a `config.yml` edited by hand, cannot be parsed."""

    slug, status = "document-invalid", 500


class StorageFull(TarnError):
    """The store has no space left."""

    slug, status = "storage-full", 507


class SourceFailed(TarnError):
    """Fetching the source failed or was incomplete. Nothing was stored."""

    slug, status, retryable = "source-failed", 502, True


class QueueItemFailed(TarnError):
    """The consumer of the queue item reported a failure or did not acknowledge the item in time."""

    slug, status = "queue-item-failed", 502


class Unavailable(TarnError):
    """The database or the object store is not available."""

    slug, status, retryable, wait = "unavailable", 503, True, 2


class QueryTimeout(TarnError):
    """The query exceeded the time limit and was stopped. Narrow it: the same query would be stopped again."""

    slug, status = "query-timeout", 504
    seconds: float


class Internal(TarnError):
    """Internal server error. Search the logs for the request id."""

    slug, status = "internal", 500


def problem_types() -> dict[str, type[TarnError]]:
    """Return every problem type by its slug."""

    def leaves(cls: type[TarnError]) -> list[type[TarnError]]:
        own = [cls] if "slug" in vars(cls) else []
        return own + [leaf for child in cls.__subclasses__() for leaf in leaves(child)]

    return {cls.slug: cls for cls in sorted(leaves(TarnError), key=lambda cls: cls.slug)}
