"""Access control: the table of the grant that each route needs, and the check that every request passes first."""

from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request, Response

from tarn.access.audit import AuditedAction
from tarn.access.identity import AuthenticatedCaller, CachedIdentity
from tarn.access.limits import check_rate
from tarn.api.http.limits.threads import ADMISSION, AUDIT, run_in_threadpool
from tarn.api.http.problems import path_of
from tarn.api.http.services.admission_cache import Admission
from tarn.api.http.services.container import Services, services_of
from tarn.datasets import registry
from tarn.datasets.registry import Dataset
from tarn.db.connection_semaphore import TENANT
from tarn.errors import (
    DatasetNotFound,
    FieldError,
    Forbidden,
    JobNotFound,
    QueueItemNotFound,
    RateLimited,
    SchemaViolation,
    StageNotFound,
    StartRefused,
    TarnError,
    Unauthenticated,
    UploadNotFound,
)
from tarn.model.names import DatasetName
from tarn.model.tenant import Identity, Level
from tarn.model.work.job import Operation

Handler = Callable[[Request], Coroutine[Any, Any, Response]]

DENIALS = (
    Unauthenticated,
    Forbidden,
    DatasetNotFound,
    JobNotFound,
    QueueItemNotFound,
    StageNotFound,
    UploadNotFound,
)
"""Errors that are recorded as denials: 401, 403, and 404 for resources that other tenants may have."""


@dataclass(frozen=True, slots=True)
class Access:
    """The access that a route requires of its caller."""

    identified: bool = True
    dataset: Level | None = None
    """The level required on the dataset in the path."""
    lake: bool = False
    """Whether the caller must be an administrator of the lake."""

    @property
    def problems(self) -> set[type[TarnError]]:
        """The problems that the access check may raise."""
        errors: set[type[TarnError]] = {Unauthenticated, RateLimited} if self.identified else set()
        if self.dataset is not None:
            errors |= {DatasetNotFound, SchemaViolation}
            errors |= {Forbidden} if self.dataset is not Level.READ else set()
        if self.lake:
            errors |= {Forbidden}
        return errors


ANYBODY = Access(identified=False)
IDENTIFIED = Access()
LAKE_ADMIN = Access(lake=True)


def on_dataset(level: Level) -> Access:
    return Access(dataset=level)


TABLE: dict[str, Access] = {
    # system
    "health": ANYBODY,
    "ready": ANYBODY,
    "metrics": ANYBODY,
    "get_problem": ANYBODY,
    "openapi": ANYBODY,
    "docs": ANYBODY,
    "whoami": IDENTIFIED,
    # catalog and datasets
    "get_catalog": IDENTIFIED,
    "get_catalog_json": IDENTIFIED,
    "update_catalog": LAKE_ADMIN,
    "list_datasets": IDENTIFIED,
    "create_dataset": IDENTIFIED,  # and admin on the dataset named in the body: `Caller.require`
    "get_dataset": on_dataset(Level.READ),
    "update_dataset": on_dataset(Level.ADMIN),
    "delete_dataset": on_dataset(Level.ADMIN),
    "list_exports": on_dataset(Level.READ),
    "get_delta_index": on_dataset(Level.READ),
    "head_delta_index": on_dataset(Level.READ),
    "get_export": on_dataset(Level.READ),
    "head_export": on_dataset(Level.READ),
    "get_export_delta": on_dataset(Level.READ),
    "head_export_delta": on_dataset(Level.READ),
    "get_freshness": on_dataset(Level.READ),
    "list_versions": on_dataset(Level.READ),
    "get_version": on_dataset(Level.READ),
    # writing
    "add_entities": on_dataset(Level.WRITE),
    "put_entity": on_dataset(Level.WRITE),
    "delete_entity": on_dataset(Level.WRITE),
    "add_statements": on_dataset(Level.WRITE),
    "delete_statement": on_dataset(Level.WRITE),
    "delete_origin": on_dataset(Level.WRITE),
    "create_stage": on_dataset(Level.WRITE),
    "list_stages": on_dataset(Level.WRITE),
    "get_stage": on_dataset(Level.WRITE),
    "stage_entities": on_dataset(Level.WRITE),
    "stage_statements": on_dataset(Level.WRITE),
    "commit_stage": on_dataset(Level.WRITE),
    "commit_stages": on_dataset(Level.WRITE),
    "abort_stage": on_dataset(Level.WRITE),
    # files
    "put_file": on_dataset(Level.WRITE),
    "post_file": on_dataset(Level.WRITE),
    "fetch_file": on_dataset(Level.WRITE),
    "list_files": on_dataset(Level.READ),
    "list_file_records": on_dataset(Level.READ),
    "get_file": on_dataset(Level.READ),
    "delete_file": on_dataset(Level.WRITE),
    "get_file_data": on_dataset(Level.READ),
    "head_file_data": on_dataset(Level.READ),
    "put_file_text": on_dataset(Level.WRITE),
    "get_file_text": on_dataset(Level.READ),
    "delete_file_text": on_dataset(Level.WRITE),
    "add_file_entity": on_dataset(Level.WRITE),
    "create_upload": on_dataset(Level.WRITE),
    "get_upload": on_dataset(Level.WRITE),
    "put_upload_block": on_dataset(Level.WRITE),
    "commit_upload": on_dataset(Level.WRITE),
    "delete_upload": on_dataset(Level.WRITE),
    # mappings
    "list_mappings": on_dataset(Level.READ),
    "get_mapping": on_dataset(Level.READ),
    "put_mapping": on_dataset(Level.WRITE),
    "list_mapping_versions": on_dataset(Level.READ),
    "get_mapping_version": on_dataset(Level.READ),
    "process_mapping": on_dataset(Operation.MAPPING.level),
    # reading
    "get_entity": on_dataset(Level.READ),
    "list_entities": on_dataset(Level.READ),
    "stream_entities": on_dataset(Level.READ),
    "list_invalid_entities": on_dataset(Level.READ),
    "query_entities": on_dataset(Level.READ),
    "aggregate_entities": on_dataset(Level.READ),
    "list_adjacent": on_dataset(Level.READ),
    "query_datasets": IDENTIFIED,  # only datasets that the caller may read
    "aggregate_datasets": IDENTIFIED,  # only datasets that the caller may read
    "list_statements": on_dataset(Level.READ),
    "stream_statements": on_dataset(Level.READ),
    # snapshots
    "list_snapshots": on_dataset(Level.READ),
    "get_snapshot": on_dataset(Level.READ),
    "list_snapshot_files": on_dataset(Level.READ),
    "diff_snapshots": on_dataset(Level.READ),
    "stream_diff": on_dataset(Level.READ),
    "list_refs": on_dataset(Level.READ),
    "get_ref": on_dataset(Level.READ),
    "set_ref": on_dataset(Level.MAINTAIN),
    "delete_ref": on_dataset(Level.MAINTAIN),
    # tags, queue and locks of the caller's own tenant
    "list_tags": on_dataset(Level.READ),
    "get_tag": on_dataset(Level.READ),
    "set_tag": on_dataset(Level.READ),
    "delete_tag": on_dataset(Level.READ),
    "is_latest_tag": on_dataset(Level.READ),
    "add_queue_item": on_dataset(Level.READ),  # and write for an item addressed to the worker
    "list_queue": on_dataset(Level.READ),
    "pop_queue_item": on_dataset(Level.READ),
    "get_queue_item": on_dataset(Level.READ),
    "ack_queue_item": on_dataset(Level.READ),
    "retry_queue_item": on_dataset(Level.READ),  # and write for an item addressed to the worker
    "delete_queue_item": on_dataset(Level.READ),
    "list_locks": on_dataset(Level.READ),
    "take_lock": on_dataset(Level.READ),
    "release_lock": on_dataset(Level.READ),
    # the journal
    "get_journal": on_dataset(Level.READ),
    "list_rejected": on_dataset(Level.MAINTAIN),
    "retry_rejected": on_dataset(Level.MAINTAIN),
    # operations
    "flush_dataset": on_dataset(Operation.FLUSH.level),
    "compact_dataset": on_dataset(Operation.COMPACT.level),
    "optimize_dataset": on_dataset(Operation.OPTIMIZE.level),
    "vacuum_dataset": on_dataset(Operation.VACUUM.level),
    "verify_dataset": on_dataset(Operation.VERIFY.level),
    "revert_dataset": on_dataset(Operation.REVERT.level),
    "purge_dataset": on_dataset(Operation.PURGE.level),
    "export_dataset": on_dataset(Operation.EXPORT.level),
    "make_dataset": on_dataset(Operation.MAKE.level),
    "crawl_dataset": on_dataset(Operation.CRAWL.level),
    "flush_datasets": IDENTIFIED,  # only datasets on which the caller holds maintain
    # jobs of the caller's own tenant
    "list_jobs": IDENTIFIED,
    "get_job": IDENTIFIED,
    "retry_job": IDENTIFIED,  # and the level that the job's operation requires: `Operation.level`
    "cancel_job": IDENTIFIED,
    # events
    "follow_dataset": on_dataset(Level.READ),
    "follow_job": IDENTIFIED,  # only jobs of the caller's own tenant
    # administration
    "get_worker": LAKE_ADMIN,
    "list_tenants": LAKE_ADMIN,
    "create_tenant": LAKE_ADMIN,
    "get_tenant": LAKE_ADMIN,
    "update_tenant": LAKE_ADMIN,
    "delete_tenant": LAKE_ADMIN,
    "list_keys": LAKE_ADMIN,
    "create_key": LAKE_ADMIN,
    "revoke_key": LAKE_ADMIN,
    "list_grants": LAKE_ADMIN,
    "create_grant": LAKE_ADMIN,
    "delete_grant": LAKE_ADMIN,
    "get_limits": LAKE_ADMIN,
    "set_limits": LAKE_ADMIN,
    "get_webhook": LAKE_ADMIN,
    "set_webhook": LAKE_ADMIN,
    "delete_webhook": LAKE_ADMIN,
    "list_audit": LAKE_ADMIN,
    "list_all_locks": LAKE_ADMIN,
    "force_release_lock": LAKE_ADMIN,
}
"""Required access by operationId. The server refuses to start if a route has no entry or an entry has no route."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The identity behind a request, and the act for the audit log."""

    identity: Identity
    act: AuditedAction

    def require(self, name: DatasetName, level: Level) -> None:
        """Raise Forbidden unless the caller holds this level on a dataset. The dataset need not exist."""
        granted = self.identity.level_on(name)
        if granted is None or not granted.allows(level):
            raise Forbidden(f"this requires {level} on {name!r}")


def access_of(operation: str) -> Access:
    """Return the access that a route requires. Raises StartRefused if the table has no entry for it."""
    try:
        return TABLE[operation]
    except KeyError:
        raise StartRefused(
            f"the route {operation!r} has no entry in the access table of app/tarn/api/http/route_access.py"
        ) from None


def check_complete(operations: set[str]) -> None:
    """Raise StartRefused if the table has an entry without a route."""
    if unused := TABLE.keys() - operations:
        raise StartRefused(
            f"the access table of app/tarn/api/http/route_access.py names routes that do not exist: {sorted(unused)}"
        )


def recording(operation: str, handle: Handler) -> Handler:
    """Wrap a route's handler: record every denial that it raises in the audit log."""

    async def recorded(request: Request) -> Response:
        request.state.act = AuditedAction(None, operation, path_of(request), request.state.request_id)
        try:
            return await handle(request)
        except DENIALS as error:
            act = request.state.act
            TENANT.set("" if act.identity is None else act.identity.tenant)
            run = AUDIT.run if act.identity is None else run_in_threadpool
            await run(services_of(request).denials.record, act, error)
            raise

    return recorded


async def admit(request: Request, operation: str, access: Access) -> None:
    """Authenticate and authorize the caller.

    A caller that this route admitted to this dataset under the current access revision is admitted again from the
    cache, without a thread: concurrent requests share one read of the revision.
    """
    if not access.identified:
        return
    services = services_of(request)
    header = request.headers.get("authorization")
    key_digest = services.authenticator.cache_key(header)
    cache_key = None if key_digest is None else (operation, request.path_params.get("dataset"), key_digest)
    admission = (
        None if cache_key is None else services.admissions.peek(await services.revision_reader.revision(), cache_key)
    )
    if admission is None:
        await ADMISSION.run(_look_up, request, services, operation, access, header, cache_key)
    else:
        admission.known.check_expiry()
        _set_caller(request, operation, admission.known)
        check_rate(services.rate, admission.known.identity)
        request.state.dataset = admission.dataset
    TENANT.set(request.state.tenant)


def _look_up(
    request: Request, services: Services, operation: str, access: Access, header: str | None, cache_key: Hashable | None
) -> None:
    """Authenticate and authorize a caller that is not in the cache.

    1. identity   a valid key or token, else 401
    2. rate       within the tenant's limit, else 429
    3. dataset    it exists and the caller holds some level on it, else 404. Both cases have the same text, and the
                  dataset is not looked up without a level, so that neither text nor timing reveals whether it exists
    4. level      it is sufficient for this route, else 403
    """
    with services.authenticator.identified(header) as authenticated:
        _set_caller(request, operation, authenticated.known)
        check_rate(services.rate, authenticated.identity)
        if access.lake:
            _require_lake(authenticated.identity)
        dataset = None if access.dataset is None else _dataset(request, services, authenticated, access.dataset)
        request.state.dataset = dataset
        if cache_key is not None:
            services.admissions.put(authenticated.revision, cache_key, Admission(authenticated.known, dataset))


def _set_caller(request: Request, operation: str, known: CachedIdentity) -> None:
    act = AuditedAction(known.identity, operation, path_of(request), request.state.request_id)
    request.state.act = act
    request.state.tenant = known.identity.tenant
    request.state.caller = Caller(known.identity, act)


def _require_lake(identity: Identity) -> None:
    if not identity.administers_lake:
        raise Forbidden("this requires an administrator of the lake: admin on *")


def _dataset(request: Request, services: Services, authenticated: AuthenticatedCaller, needed: Level) -> Dataset:
    try:
        name = DatasetName(request.path_params["dataset"])
    except ValueError as error:
        raise SchemaViolation(str(error), errors=[FieldError(field="path.dataset", reason=str(error))]) from None
    granted = authenticated.identity.level_on(name)
    dataset = None
    if granted is not None:
        dataset = services.dataset_cache.get(
            authenticated.revision, name, lambda: registry.find(authenticated.connection, name)
        )
    if granted is None or dataset is None:
        raise DatasetNotFound(f"there is no dataset {name!r}")
    if not granted.allows(needed):
        raise Forbidden(f"this requires {needed} on {name!r}; the caller holds {granted}")
    return dataset


async def _caller(request: Request) -> Caller:
    caller = request.state.caller
    assert isinstance(caller, Caller)
    return caller


def admitted(request: Request, name: DatasetName) -> Dataset:
    """Return the dataset in the path, to which the caller was admitted."""
    admitted_dataset = request.state.dataset
    assert isinstance(admitted_dataset, Dataset)
    assert admitted_dataset.name == name
    return admitted_dataset


async def _admitted_dataset(request: Request, dataset: DatasetName) -> Dataset:
    return admitted(request, dataset)


CallerDep = Annotated[Caller, Depends(_caller)]
DatasetDep = Annotated[Dataset, Depends(_admitted_dataset)]
