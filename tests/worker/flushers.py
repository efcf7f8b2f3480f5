"""A flusher without Spark and files: what it does to SQL is what a flush does."""

import threading
from collections.abc import Callable, Sequence

from sqlalchemy import select, update
from tarn.datasets import registry as datasets
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.db.tables import journal_batches, journal_head, snapshot_heads, snapshots
from tarn.errors import TarnError
from tarn.journal import head as heads
from tarn.model.flush import Flushed, Moved
from tarn.model.ids import new_id, now

from tests.in_process_api import InProcessApi


class SqlFlusher:
    """Records a snapshot of everything that waits; fails, or stops in the middle, where a test says so."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.over_threshold: list[str] = []
        self.failing: dict[str, Exception] = {}
        """What is raised when it comes to a dataset."""
        self.refusing: dict[str, TarnError] = {}
        """What a dataset has instead of a snapshot, while the others go on."""
        self.rounds: list[list[str]] = []
        self.recovered = self.closed = 0
        self.entered, self.goes_on = threading.Event(), threading.Event()
        self.goes_on.set()

    def recover(self) -> None:
        self.recovered += 1

    def due(self) -> list[str]:
        return [dataset for dataset in self.over_threshold if self._waiting(dataset)]

    def flush(
        self, dataset_ids: Sequence[str], hold: Callable[[], None], moved: Moved
    ) -> dict[str, list[Flushed] | TarnError]:
        self.rounds.append(list(dataset_ids))
        waiting = {dataset_id: self._waiting(dataset_id) for dataset_id in dataset_ids}
        for dataset_id, rows in waiting.items():
            moved(dataset_id, 0, rows)
        hold()
        self.entered.set()
        assert self.goes_on.wait(20)
        made: dict[str, list[Flushed] | TarnError] = {}
        for dataset_id in dataset_ids:
            hold()
            if dataset_id in self.failing:
                raise self.failing[dataset_id]
            made[dataset_id] = self.refusing.get(dataset_id) or self._flush(dataset_id)
            if dataset_id not in self.refusing:
                moved(dataset_id, waiting[dataset_id], waiting[dataset_id])
        return made

    def tidy(self) -> None:
        """There is nothing to clear away."""

    def close(self) -> None:
        self.closed += 1

    def _waiting(self, dataset_id: str) -> int:
        with self._database.read() as connection:
            rows = connection.execute(select(journal_head.c.rows).where(journal_head.c.dataset_id == dataset_id))
            return rows.scalar() or 0

    def _flush(self, dataset_id: str) -> list[Flushed]:
        with self._database.write() as connection:
            dataset = next((each for each in _all(connection) if each.id == dataset_id), None)
            waiting = (journal_batches.c.dataset_id == dataset_id, journal_batches.c.state == "committed")
            rows = connection.execute(select(journal_batches.c.rows).where(*waiting)).scalars().all()
            if dataset is None or not rows:
                return []
            segment = heads.rotate(connection, dataset_id)
            connection.execute(update(journal_batches).where(*waiting).values(state="done"))
            connection.execute(
                update(journal_head).where(journal_head.c.dataset_id == dataset_id).values(rows=0, size=0, oldest=None)
            )
            made = {"id": new_id(), "segment": segment}
            seq: int = connection.execute(
                update(snapshot_heads)
                .where(snapshot_heads.c.dataset_id == dataset_id)
                .values(seq=snapshot_heads.c.seq + 1, snapshot=made["id"], segment=segment)
                .returning(snapshot_heads.c.seq)
            ).scalar_one()
            connection.execute(
                snapshots.insert().values(dataset_id=dataset_id, seq=seq, content=seq, created=now(), **made)
            )
        return [Flushed(dataset.name, seq, str(made["id"]), sum(rows))]


def _all(connection) -> list[Dataset]:
    return datasets.page(connection, lambda _: True, None, None)


def id_of(house: InProcessApi, name: str) -> str:
    with house.services.database.read() as connection:
        return next(dataset.id for dataset in _all(connection) if dataset.name == name)
