"""Verify the consistency of a dataset (an fsck), while ingest, flush and vacuum continue.

SQL is read in one transaction, and manifests and data files never change. So a mismatch is real, except for two
concurrent activities, for which the checks look a second time:
- a vacuum expires the oldest snapshots and deletes their files;
- a lease holder writes Delta logs and a manifest ahead of the head, and then moves the head.
"""

from collections.abc import Iterator
from typing import NamedTuple

from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.integrity import (
    archive_checks,
    delta_checks,
    document_checks,
    file_checks,
    journal_checks,
    repair,
    row_checks,
)
from tarn.integrity.file_checks import ReferencedFiles
from tarn.integrity.findings import MOST, Findings
from tarn.integrity.history_checks import History
from tarn.integrity.row_checks import SnapshotRows
from tarn.lake.recorded_history import RecordedHistory, recorded
from tarn.model.datasets.finding import Finding, FindingKind
from tarn.model.datasets.snapshot import Snapshot
from tarn.model.work.job import Report, VerifyOptions, VerifyResult
from tarn.settings import Settings
from tarn.storage.store import Store


class Checked(NamedTuple):
    """What was checked, and the findings."""

    snapshots: int
    files: int
    size: int
    findings: Findings


def verify(
    database: Database,
    store: Store,
    settings: Settings,
    owner: str,
    dataset: Dataset,
    options: VerifyOptions,
    report: Report,
) -> VerifyResult:
    """Check a dataset; with `options.repair`, repair what can be derived from the rest, and check again.

    Problems are findings, not errors. Raises DatasetNotFound if the dataset is being deleted, Unavailable if storage
    or database do not respond, and Locked if another owner holds the lease that a repair needs.
    """
    checked = _check(database, store, settings, dataset, report)
    repaired: list[Finding] = []
    if options.repair and checked.findings.found:
        kinds = {finding.kind for finding in checked.findings.first}
        repair.repair(database, store, settings, owner, dataset, kinds, report)
        before, checked = checked.findings.first, _check(database, store, settings, dataset, report)
        repaired = [
            finding.model_copy(update={"repaired": True})
            for finding in before
            if not finding.kind.about_data and not _is_in(finding, checked)
        ]
    return VerifyResult(
        operation="verify",
        snapshots=checked.snapshots,
        files=checked.files,
        size=checked.size,
        findings=[*checked.findings.first, *repaired][:MOST],
        found=checked.findings.found + len(repaired),
        harmless=checked.findings.harmless + sum(finding.harmless for finding in repaired),
        repaired=len(repaired),
    )


def _is_in(finding: Finding, checked: Checked) -> bool:
    """Return whether the same finding was made again: same kind and path, or same detail if it has no path."""
    return any(
        (finding.kind, finding.path or finding.detail) == (other.kind, other.path or other.detail)
        for other in checked.findings.first
    )


def _check(database: Database, store: Store, settings: Settings, dataset: Dataset, report: Report) -> Checked:
    findings = Findings()
    report(None)
    with database.read() as connection:
        state = recorded(connection, dataset)
        last_commit = journal_checks.check(connection, dataset, state.head, findings)
    document_checks.check_config(store, dataset, findings)
    seen = _Seen(dataset, state)
    head = History(database, store, dataset, state, findings, seen.add).check()
    if last_commit is not None and seen.last_commit > last_commit:
        detail = f"a snapshot contains commit {seen.last_commit}, but the last assigned number is {last_commit}"
        findings.add(FindingKind.COMMIT_NUMBERS, detail)
    broken = file_checks.check(database, store, dataset, seen.named, findings, report)
    report(None)
    delta_checks.check_pinned(database, store, dataset, seen.pinned(), findings)
    if (0 if seen.newest is None else seen.newest.seq) == max(state.records, default=0):
        delta_checks.check_ahead(database, store, dataset, state.writer_state, seen.newest, findings)
    if head is not None:
        with row_checks.opened(store, settings) as duck:
            rows = SnapshotRows(duck, store, dataset)
            if rows.check_files(database, head, broken, findings, report):
                report(None)
                rows.check_fold(database, head, findings)
    archive_checks.check(database, store, dataset, findings, report)
    document_checks.check_hints(database, store, dataset, state, findings)
    return Checked(seen.snapshots, len(seen.named.files), seen.named.size, findings)


class _Seen:
    """Collects what the manifests of a history name, one manifest at a time: they are not all held in memory."""

    def __init__(self, dataset: Dataset, state: RecordedHistory) -> None:
        self.named = ReferencedFiles(dataset)
        self.snapshots = 0
        self.last_commit = 0
        self._pinned = {ref.seq for ref in state.refs}
        self._oldest: Snapshot | None = None
        self.newest: Snapshot | None = None
        self._between: list[Snapshot] = []

    def add(self, snapshot: Snapshot) -> None:
        self.named.add(snapshot)
        self.snapshots += 1
        self.last_commit = max([self.last_commit, *(batch.commit for batch in snapshot.batches)])
        self._oldest = self._oldest or snapshot
        self.newest = snapshot
        if snapshot.seq in self._pinned:
            self._between.append(snapshot)

    def pinned(self) -> Iterator[Snapshot]:
        """Return the snapshots whose tables are opened: the oldest, the newest, and those that refs name."""
        chosen = {one.seq: one for one in (self._oldest, *self._between, self.newest) if one is not None}
        return iter(chosen.values())
