"""A flusher without Spark and files that changes SQL as a flush does."""

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import select, update
from tarn.datasets import registry
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.db.tables import journal_batches, journal_head, snapshot_heads, snapshots
from tarn.errors import TarnError
from tarn.journal import head
from tarn.model.datasets.flush import FlushOutcome, FlushProgress
from tarn.model.datasets.snapshot import Counts, Snapshot
from tarn.model.ids import new_id, now

from tests.in_process_api import InProcessApi


class SqlFlusher:
    """Records a snapshot of all unflushed events; fails or blocks where a test requests it."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.over_threshold: list[str] = []
        self.failing: dict[str, Exception] = {}
        """Exception that is raised when the round reaches a dataset."""
        self.rejecting: dict[str, TarnError] = {}
        """Error that is the outcome of a dataset, while the round continues with the others."""
        self.rounds: list[list[str]] = []
        self.recovered = self.closed = 0
        self.entered, self.resumed = threading.Event(), threading.Event()
        self.resumed.set()

    def recover(self) -> None:
        self.recovered += 1

    def due(self) -> list[str]:
        return [dataset for dataset in self.over_threshold if self._unflushed_rows(dataset)]

    def seconds_until_due(self) -> float:
        return 0.01 if self.due() else math.inf

    def flush(
        self, dataset_ids: Sequence[str], hold: Callable[[], None], moved: FlushProgress
    ) -> dict[str, FlushOutcome]:
        self.rounds.append(list(dataset_ids))
        waiting = {dataset_id: self._unflushed_rows(dataset_id) for dataset_id in dataset_ids}
        for dataset_id, rows in waiting.items():
            moved(dataset_id, 0, rows)
        hold()
        self.entered.set()
        assert self.resumed.wait(20)
        outcomes: dict[str, FlushOutcome] = {}
        for dataset_id in dataset_ids:
            hold()
            if dataset_id in self.failing:
                raise self.failing[dataset_id]
            error = self.rejecting.get(dataset_id)
            outcomes[dataset_id] = FlushOutcome([] if error else self._flush(dataset_id), error)
            if dataset_id not in self.rejecting:
                moved(dataset_id, waiting[dataset_id], waiting[dataset_id])
        return outcomes

    def warm_up(self) -> None:
        """Do nothing: there is nothing to start."""

    def tidy(self) -> None:
        """Do nothing: there is nothing to clean up."""

    def close(self) -> None:
        self.closed += 1

    def _unflushed_rows(self, dataset_id: str) -> int:
        with self._database.read() as connection:
            rows = connection.execute(select(journal_head.c.rows).where(journal_head.c.dataset_id == dataset_id))
            return rows.scalar() or 0

    def _flush(self, dataset_id: str) -> list[Snapshot]:
        with self._database.write() as connection:
            dataset = next((each for each in _all(connection) if each.id == dataset_id), None)
            waiting = (journal_batches.c.dataset_id == dataset_id, journal_batches.c.state == "committed")
            rows = connection.execute(select(journal_batches.c.rows).where(*waiting)).scalars().all()
            if dataset is None or not rows:
                return []
            segment = head.rotate(connection, dataset_id)
            connection.execute(update(journal_batches).where(*waiting).values(state="done"))
            connection.execute(
                update(journal_head).where(journal_head.c.dataset_id == dataset_id).values(rows=0, size=0, oldest=None)
            )
            identity: dict[str, Any] = {"id": new_id(), "segment": segment}
            seq: int = connection.execute(
                update(snapshot_heads)
                .where(snapshot_heads.c.dataset_id == dataset_id)
                .values(seq=snapshot_heads.c.seq + 1, snapshot=identity["id"], segment=segment)
                .returning(snapshot_heads.c.seq)
            ).scalar_one()
            connection.execute(
                snapshots.insert().values(dataset_id=dataset_id, seq=seq, content=seq, created=now(), **identity)
            )
        counts: dict[str, Any] = {"added": sum(rows)}
        manifest = {"dataset": dataset.name, "seq": seq, "id": identity["id"], "rows": Counts.model_construct(**counts)}
        return [Snapshot.model_construct(**manifest)]


def _all(connection) -> list[Dataset]:
    return registry.page(connection, lambda _: True, None, None)


def id_of(api: InProcessApi, name: str) -> str:
    with api.services.database.read() as connection:
        return next(dataset.id for dataset in _all(connection) if dataset.name == name)
