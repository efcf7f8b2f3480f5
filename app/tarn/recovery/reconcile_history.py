"""Reconcile the history of one dataset after database and lake were restored to different moments.

| found                                          | done                                                               |
|------------------------------------------------|--------------------------------------------------------------------|
| manifests follow the recorded head             | recorded, as the next publisher would do; their batches are done   |
| the recorded head is incomplete                | back to the newest complete snapshot; batches whose rows are still |
|                                                | in the journal wait again; the rest is lost, and reported          |
| manifests above that one                       | moved below `versions/`: they would block the next snapshot        |
| older snapshots that are incomplete            | expired                                                            |

Numbers continue. Those of lost snapshots, and the one after them, are taken at once by snapshots that change nothing:
so a writer that still builds on a lost one finds its number taken, and a lost manifest that reappears later does not
follow the head.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import orjson
import structlog
from sqlalchemy import delete, select, update

from tarn.datasets.head import recorded_head
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.db.tables import journal_head, refs, snapshot_heads
from tarn.db.tables import snapshots as history
from tarn.integrity.repair import recount
from tarn.journal import head as heads
from tarn.journal import reconcile, segments
from tarn.lake import snapshots
from tarn.lake.commit import Build, SnapshotPublisher
from tarn.lake.recorded_history import RecordedHistory, recorded
from tarn.model.datasets.recovery import LostSnapshot, Reconciled
from tarn.model.datasets.snapshot import Head, Snapshot, SnapshotOperation
from tarn.model.ids import new_id, now
from tarn.recovery.completeness import StoredSnapshots
from tarn.settings import Settings
from tarn.storage import versions
from tarn.storage.store import ObjectMissing, Store

log = structlog.get_logger(__name__)

OWNER = "reconciliation"

NO_HEAD = Head(seq=0, id=None, content=0, segment=0)


@dataclass
class HistoryPlan:
    """The planned changes of a history."""

    dataset: Dataset
    before: Head
    target: Snapshot | None
    """The snapshot whose state the head will have; None: there is none."""
    follow: list[Snapshot] = field(default_factory=list)
    """Manifests that are to be recorded."""
    retired: list[int] = field(default_factory=list)
    """Numbers of manifests above the target, which are moved below `versions/`."""
    keep_from: int | None = None
    """Where history is to begin, if that changes."""
    back: bool = False
    reported: Reconciled | None = None

    @property
    def through(self) -> int:
        """Return the last number to take, as a client may have seen it or a writer may still write it; 0: none."""
        seen = [*self.retired, *([self.before.seq] if self.back else [])]
        return max(seen) + 1 if seen else 0

    @property
    def report(self) -> Reconciled:
        assert self.reported is not None
        return self.reported


class HistoryReconciler:
    """Plans and applies the reconciliation of histories, while no other process runs."""

    def __init__(
        self, database: Database, store: Store, settings: Settings, reached: Callable[[str], None] = lambda _: None
    ) -> None:
        self._database = database
        self._store = store
        self._settings = settings
        self._reached = reached

    # Planning

    def plan(self, dataset: Dataset) -> HistoryPlan:
        """Return the planned changes of one dataset. Changes nothing."""
        with self._database.read() as connection:
            state = recorded(connection, dataset)
        stored = StoredSnapshots(self._store, dataset)
        before = state.head or NO_HEAD
        lost, target = self._newest_complete(state, before, stored)
        plan = HistoryPlan(dataset, before, target, back=bool(lost))
        incomplete: list[LostSnapshot] = []
        if not lost:
            self._follow(plan, stored, incomplete)
        top = 0 if plan.target is None else plan.target.seq
        if plan.target is None and not lost:
            top = before.seq
        plan.retired = [seq for seq in stored.numbers if seq > top]
        finding = "database ahead" if lost else "lake ahead" if plan.follow else "same"
        plan.reported = Reconciled(
            dataset=dataset.name,
            id=dataset.id,
            found=finding,
            head_before=None if before.id is None else before.seq,
            head=None if plan.target is None else plan.target.seq,
            recorded=[one.seq for one in plan.follow],
            aside=[dataset.layout.snapshot(seq) for seq in plan.retired],
        )
        plan.report.lost.snapshots = [*reversed(lost), *incomplete]
        self._plan_history(plan, state, stored)
        self._plan_journal(plan, stored)
        return plan

    def _newest_complete(
        self, state: RecordedHistory, before: Head, stored: StoredSnapshots
    ) -> tuple[list[LostSnapshot], Snapshot | None]:
        """Return the snapshots after the newest complete recorded one, newest first, and that one."""
        lost: list[LostSnapshot] = []
        if before.id is None:
            return lost, None
        for seq in range(before.seq, min(state.records, default=before.seq) - 1, -1):
            record = state.records.get(seq)
            expected_id = before.id if seq == before.seq else None if record is None else record.id
            manifest = stored.readable_manifest(seq)
            if manifest is None:
                lacks: str | None = "its manifest is missing"
            elif manifest.id != expected_id:
                lacks = f"the lake has another snapshot with its number, {manifest.id}"
            else:
                lacks = stored.first_missing_part(manifest) or stored.table_difference(manifest)
            if lacks is None:
                return lost, manifest
            created = now() if record is None else record.created
            lost.append(LostSnapshot(seq=seq, id=expected_id or "", created=created, lacks=lacks))
        return lost, None

    def _follow(self, plan: HistoryPlan, stored: StoredSnapshots, incomplete: list[LostSnapshot]) -> None:
        """Find the complete snapshots whose manifests follow the recorded head."""
        parent, seq = plan.before.id, plan.before.seq + 1
        while (manifest := stored.readable_manifest(seq)) is not None and manifest.parent == parent:
            lacks = stored.first_missing_part(manifest) or stored.table_difference(manifest)
            if lacks is not None:
                incomplete.append(LostSnapshot(seq=seq, id=manifest.id, created=manifest.created, lacks=lacks))
                return
            plan.follow.append(manifest)
            plan.target, parent, seq = manifest, manifest.id, seq + 1

    def _plan_history(self, plan: HistoryPlan, state: RecordedHistory, stored: StoredSnapshots) -> None:
        """Find where the complete history begins, and which refs name snapshots outside of it."""
        target, losses = plan.target, plan.report.lost
        if target is not None:
            first = min(state.kept, default=target.seq)
            if plan.back:
                # What a lost snapshot expired is not expired any more.
                low = target.retained_from or min(stored.numbers)
                first = min(first, low) if state.expired_range is not None else first
            elif plan.follow:
                first = max(first, target.retained_from or 0)
            begin, child = target.seq, target
            while begin > first:
                manifest = stored.readable_manifest(begin - 1)
                if manifest is None or manifest.id != child.parent or stored.first_missing_part(manifest) is not None:
                    break
                begin, child = begin - 1, manifest
            plan.keep_from = begin
            if begin > first:
                losses.history_below = begin
        kept_numbers = range(0) if target is None else range(plan.keep_from or 0, target.seq + 1)
        losses.refs = [ref.name for ref in state.refs if ref.seq not in kept_numbers]

    def _plan_journal(self, plan: HistoryPlan, stored: StoredSnapshots) -> None:
        target, report = plan.target, plan.report
        segment = 0 if target is None else target.segment
        with self._database.read() as connection:
            in_lake = {batch.id for manifest in plan.follow for batch in manifest.batches}
            late = [
                one for one in reconcile.skipped_batches(connection, plan.dataset, segment) if one.id not in in_lake
            ]
            report.again = late
            if plan.back:
                in_journal, missing = reconcile.unflushed_by_rollback(connection, plan.dataset, segment)
                report.again = [*late, *in_journal]
                flushed = self._last_flushed(plan, stored)
                report.lost.commits = reconcile.lost_commits(connection, plan.dataset, flushed, report.again)
                report.lost.batches = missing
            for one in report.lost.snapshots:
                manifest = stored.readable_manifest(one.seq)
                if manifest is not None and manifest.id == one.id:
                    known = {batch.id for batch in (*report.again, *report.lost.batches)}
                    unknown_batches = reconcile.unknown(connection, plan.dataset, manifest.batches)
                    report.lost.batches += [batch for batch in unknown_batches if batch.id not in known]
            for manifest in plan.follow:
                unknown = {batch.id for batch in reconcile.unknown(connection, plan.dataset, manifest.batches)}
                report.lost.rejected += sum(event.batch in unknown for event in manifest.set_aside)

    def _last_flushed(self, plan: HistoryPlan, stored: StoredSnapshots) -> int:
        """Return the highest commit number in the remaining history."""
        if plan.target is None:
            return 0
        highest, seq, begin = 0, plan.target.seq, plan.keep_from or plan.target.seq
        while not highest and seq >= begin and (manifest := stored.readable_manifest(seq)) is not None:
            highest = max((batch.commit for batch in manifest.batches), default=0)
            seq -= 1
        return highest or reconcile.last_commit(plan.target)

    # Applying

    def apply(self, plan: HistoryPlan) -> Reconciled:
        """Apply a plan. After a crash, plan and apply again: it continues, and reports again what was lost."""
        dataset, before = plan.dataset, self._read_note(plan.dataset)
        if before is not None:
            through, earlier = before
            plan.reported = _merge_reports(earlier, plan.report)
        else:
            through = plan.through
        if through:
            note = {"through": through, "told": plan.report.model_dump(mode="json")}
            self._store.put(dataset.layout.snapshot_note, orjson.dumps(note))
            self._reached("note written")
        for seq in plan.retired:
            versions.retire(self._store, dataset.layout.snapshot(seq), dataset.layout.versions, now())
        self._reached("manifests retired")
        # First of all: a ref to a lost snapshot would keep it from expiring.
        with self._database.write() as connection:
            conditions = refs.c.dataset_id == dataset.id, refs.c.name.in_(plan.report.lost.refs)
            connection.execute(delete(refs).where(*conditions))
        if plan.back:
            self._go_back(plan, through)
            self._reached("went back")
        elif plan.follow:
            with self._database.write() as connection:
                reconcile.catch_up(connection, dataset, plan.follow)
            self._reached("caught up")
            self._publisher().recover(dataset)
            self._reached("recorded")
        self._settle_journal(plan)
        self._take_numbers(plan, through)
        self._reached("numbers taken")
        self._begin_history(plan)
        self._store.delete([dataset.layout.snapshot_note])
        return plan.report

    def _read_note(self, dataset: Dataset) -> tuple[int, Reconciled] | None:
        """Return the last number to take and the report of an earlier attempt that did not finish, or None."""
        try:
            note = orjson.loads(self._store.get(dataset.layout.snapshot_note))
        except ObjectMissing:
            return None
        return int(note["through"]), Reconciled.model_validate(note["told"])

    def _go_back(self, plan: HistoryPlan, through: int) -> None:
        """Make the newest complete snapshot the head, with all dependent rows in one transaction."""
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
                conditions = own, history.c.seq >= plan.keep_from
                connection.execute(update(history).where(*conditions).values(expired=None))
            connection.execute(update(snapshot_heads).where(snapshot_heads.c.dataset_id == dataset.id).values(**head))
            reconcile.roll_back(connection, dataset, plan.report.again, target)
            heads.touch(connection, dataset.id, segments.LAST_MOVED, now())

    def _settle_journal(self, plan: HistoryPlan) -> None:
        """Continue the journal above the head, and move batches that wait in done segments to the open one."""
        dataset = plan.dataset
        with self._database.write() as connection:
            connection.execute(
                select(journal_head.c.dataset_id).where(journal_head.c.dataset_id == dataset.id).with_for_update()
            )
            head = recorded_head(connection, dataset)
            commit = 0 if plan.target is None else reconcile.last_commit(plan.target)
            reconcile.raise_to(connection, dataset, commit, head.segment + 1)
            reconcile.reopen(connection, dataset, head.segment)
        recount(self._database, dataset)

    def _take_numbers(self, plan: HistoryPlan, through: int) -> None:
        """Take the numbers of lost snapshots by empty snapshots. Without any snapshot, the numbers are skipped."""
        with self._database.write() as connection:
            below = snapshot_heads.c.snapshot.is_(None), snapshot_heads.c.seq < through
            own = snapshot_heads.c.dataset_id == plan.dataset.id
            connection.execute(update(snapshot_heads).where(own, *below).values(seq=through))
        while (head := self._head(plan.dataset)).id is not None and head.seq < through:
            back = plan.report.head
            self._publish(
                plan.dataset, head, SnapshotOperation.REVERT, f"back to snapshot {back}: later snapshots were lost"
            )

    def _begin_history(self, plan: HistoryPlan) -> None:
        """Expire the incomplete snapshots."""
        below = plan.report.lost.history_below
        if below is not None:
            message = f"snapshots below {below} were lost"
            self._publish(plan.dataset, self._head(plan.dataset), SnapshotOperation.VACUUM, message, below)

    def _publish(
        self, dataset: Dataset, head: Head, operation: SnapshotOperation, message: str, retained_from: int | None = None
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
            return recorded_head(connection, dataset)

    def _publisher(self) -> SnapshotPublisher:
        return SnapshotPublisher(self._database, self._store, self._settings, OWNER)


def _merge_reports(first: Reconciled, then: Reconciled) -> Reconciled:
    """Merge the reports of two attempts. The second sees only what the first had not done."""
    lost = first.lost.model_copy(
        update={
            name: getattr(then.lost, name) for name in type(then.lost).model_fields if not getattr(first.lost, name)
        }
    )
    again = {batch.id: batch for batch in (*first.again, *then.again)}
    aside = [*dict.fromkeys([*first.aside, *then.aside])]
    return first.model_copy(update={"lost": lost, "again": [*again.values()], "aside": aside})
