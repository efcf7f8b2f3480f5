"""One dataset's history, where the database is of another moment than the lake.

| found                                          | done                                                               |
|------------------------------------------------|--------------------------------------------------------------------|
| manifests follow the recorded head             | recorded, as the next one who publishes would; their batches done  |
| the recorded head is not whole                 | back to the newest snapshot that is; batches whose rows are still  |
|                                                | in the journal wait again; the rest is lost, and told              |
| manifests above that one                       | put below `versions/`: they would be in the way of the next        |
| older snapshots that are not whole             | given up                                                           |

Numbers go on. Those of snapshots that were lost, and the one after them, are taken at once by snapshots that change
nothing: so whoever still builds on a lost one finds its number taken, and what comes to light of it later follows
nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import orjson
import structlog
from sqlalchemy import delete, select, update

from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.db.tables import journal_head, refs, snapshot_heads
from tarn.db.tables import snapshots as history
from tarn.integrity.repair import recount
from tarn.journal import head as heads
from tarn.journal import reconcile as recovery
from tarn.journal import segments
from tarn.lake import snapshots
from tarn.lake.commit import Build, SnapshotPublisher
from tarn.lake.recorded_history import RecordedHistory, recorded
from tarn.model.ids import new_id, now
from tarn.model.recovery import LostSnapshot, Reconciled
from tarn.model.snapshot import Change, Head, Snapshot
from tarn.recovery.completeness import StoredSnapshots
from tarn.settings import Settings
from tarn.storage import versions
from tarn.storage.store import Missing, Store

log = structlog.get_logger(__name__)

OWNER = "reconciliation"

NO_HEAD = Head(seq=0, id=None, content=0, segment=0)


@dataclass
class HistoryPlan:
    """What is to become of a history."""

    dataset: Dataset
    before: Head
    target: Snapshot | None
    """The snapshot whose state is to be the head's; None: there is none."""
    follow: list[Snapshot] = field(default_factory=list)
    """Manifests that are to be recorded."""
    aside: list[int] = field(default_factory=list)
    keep_from: int | None = None
    """Where history is to begin, if not where it does."""
    back: bool = False
    told: Reconciled | None = None

    @property
    def through(self) -> int:
        """The last number that is to be taken, as somebody may have seen it or may still write it; 0: none is."""
        seen = [*self.aside, *([self.before.seq] if self.back else [])]
        return max(seen) + 1 if seen else 0

    @property
    def said(self) -> Reconciled:
        assert self.told is not None
        return self.told


class HistoryReconciler:
    """Plans and does it, while nobody else is at work."""

    def __init__(
        self, database: Database, store: Store, settings: Settings, reached: Callable[[str], None] = lambda _: None
    ) -> None:
        self._database = database
        self._store = store
        self._settings = settings
        self._reached = reached

    # Looking

    def plan(self, dataset: Dataset) -> HistoryPlan:
        """Look at one dataset. Changes nothing."""
        with self._database.read() as connection:
            state = recorded(connection, dataset)
        held = StoredSnapshots(self._store, dataset)
        before = state.head or NO_HEAD
        lost, target = self._newest_whole(state, before, held)
        plan = HistoryPlan(dataset, before, target, back=bool(lost))
        unfit: list[LostSnapshot] = []
        if not lost:
            self._follow(plan, held, unfit)
        top = 0 if plan.target is None else plan.target.seq
        if plan.target is None and not lost:
            top = before.seq
        plan.aside = [seq for seq in held.numbers if seq > top]
        found = "database ahead" if lost else "lake ahead" if plan.follow else "same"
        plan.told = Reconciled(
            dataset=dataset.name,
            id=dataset.id,
            found=found,
            head_before=None if before.id is None else before.seq,
            head=None if plan.target is None else plan.target.seq,
            recorded=[one.seq for one in plan.follow],
            aside=[dataset.layout.snapshot(seq) for seq in plan.aside],
        )
        plan.said.lost.snapshots = [*reversed(lost), *unfit]
        self._plan_history(plan, state, held)
        self._plan_journal(plan, held)
        return plan

    def _newest_whole(
        self, state: RecordedHistory, before: Head, held: StoredSnapshots
    ) -> tuple[list[LostSnapshot], Snapshot | None]:
        """The newest recorded snapshot that is whole, and those after it, newest first."""
        lost: list[LostSnapshot] = []
        if before.id is None:
            return lost, None
        for seq in range(before.seq, min(state.records, default=before.seq) - 1, -1):
            record = state.records.get(seq)
            wanted = before.id if seq == before.seq else None if record is None else record.id
            manifest = held.own(seq)
            if manifest is None:
                lacks: str | None = "its manifest is not there"
            elif manifest.id != wanted:
                lacks = f"its number has another snapshot in the lake, {manifest.id}"
            else:
                lacks = held.lacks(manifest) or held.differs(manifest)
            if lacks is None:
                return lost, manifest
            created = now() if record is None else record.created
            lost.append(LostSnapshot(seq=seq, id=wanted or "", created=created, lacks=lacks))
        return lost, None

    def _follow(self, plan: HistoryPlan, held: StoredSnapshots, unfit: list[LostSnapshot]) -> None:
        """Find the manifests that follow the recorded head and are whole."""
        parent, seq = plan.before.id, plan.before.seq + 1
        while (manifest := held.own(seq)) is not None and manifest.parent == parent:
            lacks = held.lacks(manifest) or held.differs(manifest)
            if lacks is not None:
                unfit.append(LostSnapshot(seq=seq, id=manifest.id, created=manifest.created, lacks=lacks))
                return
            plan.follow.append(manifest)
            plan.target, parent, seq = manifest, manifest.id, seq + 1

    def _plan_history(self, plan: HistoryPlan, state: RecordedHistory, held: StoredSnapshots) -> None:
        """Find where whole history begins, and which refs point outside of it."""
        target, losses = plan.target, plan.said.lost
        if target is not None:
            first = min(state.kept, default=target.seq)
            if plan.back:
                # What was given up by a snapshot that is lost was not given up.
                low = target.retained_from or min(held.numbers)
                first = min(first, low) if state.gone is not None else first
            elif plan.follow:
                first = max(first, target.retained_from or 0)
            begin, child = target.seq, target
            while begin > first:
                manifest = held.own(begin - 1)
                if manifest is None or manifest.id != child.parent or held.lacks(manifest) is not None:
                    break
                begin, child = begin - 1, manifest
            plan.keep_from = begin
            if begin > first:
                losses.history_below = begin
        kept = range(0) if target is None else range(plan.keep_from or 0, target.seq + 1)
        losses.refs = [pin.name for pin in state.pins if pin.seq not in kept]

    def _plan_journal(self, plan: HistoryPlan, held: StoredSnapshots) -> None:
        target, said = plan.target, plan.said
        segment = 0 if target is None else target.segment
        with self._database.read() as connection:
            in_lake = {batch.id for manifest in plan.follow for batch in manifest.batches}
            late = [one for one in recovery.skipped_batches(connection, plan.dataset, segment) if one.id not in in_lake]
            said.again = late
            if plan.back:
                whole, gone = recovery.unflushed_by_rollback(connection, plan.dataset, segment)
                said.again = [*late, *whole]
                flushed = self._last_flushed(plan, held)
                said.lost.commits = recovery.lost_commits(connection, plan.dataset, flushed, said.again)
                said.lost.batches = gone
            for one in said.lost.snapshots:
                manifest = held.own(one.seq)
                if manifest is not None and manifest.id == one.id:
                    known = {batch.id for batch in (*said.again, *said.lost.batches)}
                    found = recovery.unknown(connection, plan.dataset, manifest.batches)
                    said.lost.batches += [batch for batch in found if batch.id not in known]
            for manifest in plan.follow:
                unknown = {batch.id for batch in recovery.unknown(connection, plan.dataset, manifest.batches)}
                said.lost.rejected += sum(aside.batch in unknown for aside in manifest.set_aside)

    def _last_flushed(self, plan: HistoryPlan, held: StoredSnapshots) -> int:
        """The highest commit number that is in what is left of history."""
        if plan.target is None:
            return 0
        highest, seq, begin = 0, plan.target.seq, plan.keep_from or plan.target.seq
        while not highest and seq >= begin and (manifest := held.own(seq)) is not None:
            highest = max((batch.commit for batch in manifest.batches), default=0)
            seq -= 1
        return highest or recovery.last_commit(plan.target)

    # Doing

    def apply(self, plan: HistoryPlan) -> Reconciled:
        """Do it. Run again after a crash, it goes on, and tells again what was lost."""
        dataset, before = plan.dataset, self._noted(plan.dataset)
        if before is not None:
            through, told = before
            plan.told = _merge_reports(told, plan.said)
        else:
            through = plan.through
        if through:
            note = {"through": through, "told": plan.said.model_dump(mode="json")}
            self._store.put(dataset.layout.snapshot_note, orjson.dumps(note))
            self._reached("noted")
        for seq in plan.aside:
            versions.retire(self._store, dataset.layout.snapshot(seq), dataset.layout.versions, now())
        self._reached("aside")
        # First of all: a ref to what is lost would keep it, whatever snapshots say that gave it up.
        with self._database.write() as connection:
            gone = refs.c.dataset_id == dataset.id, refs.c.name.in_(plan.said.lost.refs)
            connection.execute(delete(refs).where(*gone))
        if plan.back:
            self._go_back(plan, through)
            self._reached("went back")
        elif plan.follow:
            with self._database.write() as connection:
                recovery.catch_up(connection, dataset, plan.follow)
            self._reached("caught up")
            self._publisher().recover(dataset)
            self._reached("recorded")
        self._settle_journal(plan)
        self._seal(plan, through)
        self._reached("sealed")
        self._begin_history(plan)
        self._store.delete([dataset.layout.snapshot_note])
        return plan.said

    def _noted(self, dataset: Dataset) -> tuple[int, Reconciled] | None:
        """What an earlier attempt set out to do, if it did not come to its end."""
        try:
            note = orjson.loads(self._store.get(dataset.layout.snapshot_note))
        except Missing:
            return None
        return int(note["through"]), Reconciled.model_validate(note["told"])

    def _go_back(self, plan: HistoryPlan, through: int) -> None:
        """Make the newest whole snapshot the head, in one transaction with all that follows from it."""
        dataset, target = plan.dataset, plan.target
        above = 0 if target is None else target.seq
        head = (
            {"seq": through, "snapshot": None, "content": 0, "segment": 0}
            if target is None
            else {"seq": target.seq, "snapshot": target.id, "content": target.content, "segment": target.segment}
        )
        with self._database.write() as connection:
            own = history.c.dataset_id == dataset.id
            connection.execute(delete(history).where(own, history.c.seq > above))
            if plan.keep_from is not None:
                kept = own, history.c.seq >= plan.keep_from
                connection.execute(update(history).where(*kept).values(expired=None))
            connection.execute(update(snapshot_heads).where(snapshot_heads.c.dataset_id == dataset.id).values(**head))
            recovery.roll_back(connection, dataset, plan.said.again, target)
            heads.touch(connection, dataset.id, segments.LAST_MOVED, now())

    def _settle_journal(self, plan: HistoryPlan) -> None:
        """Let the journal go on above the head, and what waits in segments that are done wait in the open one."""
        dataset = plan.dataset
        with self._database.write() as connection:
            connection.execute(
                select(journal_head.c.dataset_id).where(journal_head.c.dataset_id == dataset.id).with_for_update()
            )
            head = snapshots.recorded(connection, dataset)
            commit = 0 if plan.target is None else recovery.last_commit(plan.target)
            recovery.raise_to(connection, dataset, commit, head.segment + 1)
            recovery.reopen(connection, dataset, head.segment)
        recount(self._database, dataset)

    def _seal(self, plan: HistoryPlan, through: int) -> None:
        """Take the numbers of what was lost. Where there is no snapshot at all, they are passed over."""
        with self._database.write() as connection:
            below = snapshot_heads.c.snapshot.is_(None), snapshot_heads.c.seq < through
            own = snapshot_heads.c.dataset_id == plan.dataset.id
            connection.execute(update(snapshot_heads).where(own, *below).values(seq=through))
        while (head := self._head(plan.dataset)).id is not None and head.seq < through:
            back = plan.said.head
            self._publish(plan.dataset, head, Change.REVERT, f"back to snapshot {back}: what came after it was lost")

    def _begin_history(self, plan: HistoryPlan) -> None:
        """Give up the snapshots that are not whole."""
        below = plan.said.lost.history_below
        if below is not None:
            message = f"snapshots below {below} were lost"
            self._publish(plan.dataset, self._head(plan.dataset), Change.VACUUM, message, below)

    def _publish(
        self, dataset: Dataset, head: Head, operation: Change, message: str, retained_from: int | None = None
    ) -> None:
        checksum = snapshots.read(self._store, dataset, head.seq).components.checksum
        self._publisher().publish(
            Build(
                dataset,
                operation,
                new_id(),
                head,
                None,
                added={},
                message=message,
                checksum=checksum,
                retained_from=retained_from,
            )
        )

    def _head(self, dataset: Dataset) -> Head:
        with self._database.read() as connection:
            return snapshots.recorded(connection, dataset)

    def _publisher(self) -> SnapshotPublisher:
        return SnapshotPublisher(self._database, self._store, self._settings, OWNER)


def _merge_reports(first: Reconciled, then: Reconciled) -> Reconciled:
    """What two attempts have found together. The second sees only what the first had not done."""
    lost = first.lost.model_copy(
        update={
            name: getattr(then.lost, name) for name in type(then.lost).model_fields if not getattr(first.lost, name)
        }
    )
    again = {batch.id: batch for batch in (*first.again, *then.again)}
    aside = [*dict.fromkeys([*first.aside, *then.aside])]
    return first.model_copy(update={"lost": lost, "again": [*again.values()], "aside": aside})
