"""How fresh a write is when it is answered: durable in the journal, or in a snapshot."""

from typing import Annotated, Literal, NamedTuple

from fastapi import Query
from pydantic import BaseModel

from tarn.api.http.limits.threads import run_in_threadpool
from tarn.api.http.polling import poll_intervals
from tarn.api.http.problems import Responses
from tarn.api.http.route_access import Caller
from tarn.api.http.services.container import Services
from tarn.datasets.registry import Dataset
from tarn.db import jobs
from tarn.errors import Unavailable
from tarn.journal.batches import segment_of
from tarn.journal.overlay import present
from tarn.lake import snapshots
from tarn.lake.snapshots import Named
from tarn.model.job import JobState, Operation

Commit = Literal["auto", "wait_for", "force"]

CommitParam = Annotated[
    Commit,
    Query(
        description="When to answer: `auto`, once it is durable in the journal; `wait_for`, once a snapshot holds it; "
        "`force`, the same after asking for a flush. If that takes too long the answer is 202, and `snapshot` is null: "
        "the write is durable, and will be in a snapshot later."
    ),
]


class SnapshotName(BaseModel):
    """A snapshot by number and id."""

    seq: int
    id: str


def accepted_response(model: type[BaseModel]) -> Responses:
    """The answer to a write that waited for its snapshot in vain."""
    return {202: {"model": model, "description": "Durable, and in no snapshot yet: the wait is over, not the flush."}}


class Waited(NamedTuple):
    """What came of a wait: the snapshot, and the status that says whether it was waited for in vain."""

    snapshot: Named | None
    status: int

    @property
    def shown(self) -> SnapshotName | None:
        return None if self.snapshot is None else SnapshotName(seq=self.snapshot.seq, id=self.snapshot.id)


async def wait_for_snapshot(
    house: Services, caller: Caller, dataset: Dataset, number: int | None, commit: Commit
) -> Waited:
    """Wait for the snapshot that holds a commit, if the caller asks for that. Without a commit there is none."""
    if commit == "auto" or number is None:
        return Waited(None, 200)
    segment = await run_in_threadpool(_segment, house, dataset, number)
    found = await run_in_threadpool(_holding, house, dataset, segment)
    if found is None:
        job = await run_in_threadpool(_ask, house, caller, dataset) if commit == "force" else None
        async for _ in poll_intervals(house, house.settings.commit_wait):
            found = await run_in_threadpool(_holding, house, dataset, segment)
            if found is not None or (job is not None and await run_in_threadpool(_has_failed, house, job)):
                break
    return Waited(found, 202 if found is None else 200)


async def flush_first(house: Services, caller: Caller, dataset: Dataset) -> None:
    """Flush what waits in a dataset's journal now. Raises Unavailable if that does not come to an end in time."""
    commit = await run_in_threadpool(_waiting, house, dataset)
    if commit is None:
        return
    if (await wait_for_snapshot(house, caller, dataset, commit, "force")).snapshot is None:
        raise Unavailable(f"the flush of {dataset.name!r} is not done yet", retry_after=2)


def _waiting(house: Services, dataset: Dataset) -> int | None:
    """The last commit, if anything waits to be flushed."""
    with house.database.read() as connection:
        now = present(connection, dataset)
    return now.commit if now.waiting else None


def _segment(house: Services, dataset: Dataset, number: int) -> int | None:
    with house.database.read() as connection:
        return segment_of(connection, dataset, number)


def _holding(house: Services, dataset: Dataset, segment: int | None) -> Named | None:
    """The first snapshot that holds a segment. A batch that is not known any more is in one: then it is the head."""
    with house.database.read() as connection:
        if segment is not None:
            return snapshots.first_containing(connection, dataset, segment)
        head = snapshots.recorded(connection, dataset)
        return None if head.id is None else Named(head.seq, head.id)


def _ask(house: Services, caller: Caller, dataset: Dataset) -> str:
    with house.database.write() as connection:
        job = jobs.enqueue(connection, Operation.FLUSH, dataset.id, caller.identity.tenant, caller.act.request)
    return job.id


def _has_failed(house: Services, job_id: str) -> bool:
    with house.database.read() as connection:
        return jobs.get(connection, job_id).state in (JobState.FAILED, JobState.CANCELLED)
