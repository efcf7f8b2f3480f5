"""`commit` parameter: respond once a write is durable in the journal, or wait for a snapshot that contains it."""

from typing import Annotated, Literal, NamedTuple

from fastapi import Query
from pydantic import BaseModel

from tarn.api.http.limits.threads import run_in_threadpool
from tarn.api.http.polling import wait_until
from tarn.api.http.problems import Responses
from tarn.api.http.route_access import Caller
from tarn.api.http.services.container import Services
from tarn.datasets.registry import Dataset
from tarn.db.notifications import job_topic, snapshot_topic
from tarn.errors import Unavailable
from tarn.lake.snapshots import SnapshotKey
from tarn.model.work.job import JobState

Commit = Literal["auto", "wait_for", "force"]

CommitParam = Annotated[
    Commit,
    Query(
        description="When to respond: `auto`: once the write is durable in the journal; `wait_for`: once a snapshot "
        "contains it; `force`: request a flush, then wait likewise. If that takes too long, the status is 202 and "
        "`snapshot` is null: the write is durable, and will be in a snapshot later."
    ),
]


class SnapshotName(BaseModel):
    """A snapshot by number and id."""

    seq: int
    id: str


def accepted_response(model: type[BaseModel]) -> Responses:
    """Return the 202 response of a write whose snapshot did not come in time."""
    return {
        202: {
            "model": model,
            "description": "The write is durable but in no snapshot yet: the wait timed out, the flush goes on.",
        }
    }


class Waited(NamedTuple):
    """The result of a wait: the snapshot, or None, and the HTTP status."""

    snapshot: SnapshotKey | None
    status: int

    @property
    def shown(self) -> SnapshotName | None:
        return None if self.snapshot is None else SnapshotName(seq=self.snapshot.seq, id=self.snapshot.id)


async def wait_for_snapshot(
    services: Services, caller: Caller, dataset: Dataset, number: int | None, commit: Commit
) -> Waited:
    """Wait for the snapshot that contains a commit, if `commit` asks for that. Without a commit number, do not wait."""
    if commit == "auto" or number is None:
        return Waited(None, 200)
    segment = await run_in_threadpool(services.journal.segment_of, dataset, number)
    snapshot = await run_in_threadpool(services.snapshots.containing, dataset, segment)
    if snapshot is None:
        flushing = commit == "force"
        job = await run_in_threadpool(services.jobs.enqueue_flush, dataset, caller.act) if flushing else None

        def check() -> Waited | None:
            found = services.snapshots.containing(dataset, segment)
            if found is not None:
                return Waited(found, 200)
            has_failed = job is not None and services.jobs.get(job.id).state in (JobState.FAILED, JobState.CANCELLED)
            return Waited(None, 202) if has_failed else None

        topics = [snapshot_topic(dataset.id), *([] if job is None else [job_topic(job.id)])]
        waited = await wait_until(services, services.settings.commit_wait, topics, lambda: run_in_threadpool(check))
        return waited or Waited(None, 202)
    return Waited(snapshot, 200)


async def flush_first(services: Services, caller: Caller, dataset: Dataset) -> None:
    """Flush a dataset's journal and wait for the snapshot. Raises Unavailable if that takes too long."""
    commit = await run_in_threadpool(services.journal.last_commit, dataset)
    if commit is None:
        return
    if (await wait_for_snapshot(services, caller, dataset, commit, "force")).snapshot is None:
        raise Unavailable(f"the flush of {dataset.name!r} has not finished yet; retry later", retry_after=2)
