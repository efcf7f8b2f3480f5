"""The journal's writer: small batches share transactions, large ones go in chunk by chunk."""

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import structlog

from tarn.db.engine import Database
from tarn.errors import TarnError, Unavailable
from tarn.journal import batches
from tarn.journal.batches import Batch, BatchOutcome, BatchWithEvents, Overtaken
from tarn.journal.bulk import Bulk, bulk_for
from tarn.journal.event_buffer import Chunk, Events
from tarn.journal.formats.counting import require_equal
from tarn.model.ids import now
from tarn.settings import Settings
from tarn.telemetry import Telemetry

log = structlog.get_logger(__name__)

MOST_ROWS = 20_000
MOST_BATCHES = 256
"""How much one shared transaction takes."""


FEW_ROWS = 2_000
"""A batch of more rows goes the bulk way, though it be one chunk: to insert them one by one is Python's work, and after
each the thread has to wait for its turn."""


class Writer:
    """Writes batches for one process.

    Group commit: one thread takes all small batches that wait and commits them in one transaction, so that many
    clients share one fsync; while it does, the next ones gather. A large batch is written by the thread that has it,
    one chunk behind: the next chunk is read while the last one is on its way.
    """

    def __init__(self, database: Database, settings: Settings, watch: Telemetry | None = None) -> None:
        self._database = database
        self._watch = watch or Telemetry()
        self._settings = settings
        self._bulk: Bulk = bulk_for(database)
        self._waiting: queue.SimpleQueue[tuple[BatchWithEvents, Future[BatchOutcome]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._commit_groups, name="group commit", daemon=True)
        self._thread.start()

    def submit(self, batch: Batch, events: Chunk) -> "Future[BatchOutcome]":
        """Write a small batch; the future is done when it is durable, or says why it is not. No events are no batch."""
        future: Future[BatchOutcome] = Future()
        if not len(events) and not batch.rows:
            future.set_result(BatchOutcome(batch.answer))
            return future
        self._waiting.put((BatchWithEvents(batch, events), future))
        return future

    def write_body(self, batch: Batch, chunks: Iterator[Chunk], finished: Callable[[], Batch]) -> BatchOutcome:
        """Write a body as one batch while it is read; if anything fails on the way, nothing of it is left.

        `finished` gives the batch with its answer, once all chunks have been read.
        """
        first, second = next(chunks, None), next(chunks, None)
        if first is None or (second is None and len(first) <= FEW_ROWS):
            return self.submit(finished(), Events() if first is None else first).result()
        if second is None:
            batch = finished()
            if (before := self._replayed(batch)) is not None:
                return before
        batch_id = batches.open_large(self._database, self._settings, batch, first)
        try:
            if second is None:
                self._write_rows(batch_id, 0, first)
                rows = len(first)
            else:
                rows = self._write_behind(batch, batch_id, first, second, chunks)
            batch = finished()
            require_equal(rows, batch.rows, "rows were written", "were read")
            with self._watch.commits.time():
                outcome = self._commit_large(batch, batch_id)
        except BaseException:
            self._abort(batch_id)
            raise
        if outcome.replayed:
            self._abort(batch_id)
        else:
            self._watch.batches.observe(rows)
        return outcome

    def close(self) -> None:
        """Finish what waits, and stop."""
        self._waiting.put(None)
        self._thread.join()
        self._bulk.close()

    def _replayed(self, batch: Batch) -> BatchOutcome | None:
        """The answer that was kept, before limits are looked at: it was within them then."""
        if batch.once is None:
            return None
        with self._database.read() as connection:
            return batches.replay(connection, batch)

    def _write_behind(self, batch: Batch, batch_id: int, first: Chunk, second: Chunk, rest: Iterator[Chunk]) -> int:
        """Returns how many rows there were."""
        with ThreadPoolExecutor(1, thread_name_prefix="chunk") as behind:
            under_way, position = behind.submit(self._write_rows, batch_id, 0, first), len(first)
            for chunk in itertools.chain((second,), rest):
                under_way.result()
                under_way = behind.submit(self._write_chunk, batch, batch_id, position, chunk)
                position += len(chunk)
            under_way.result()
        return position

    def _write_chunk(self, batch: Batch, batch_id: int, position: int, chunk: Chunk) -> None:
        batches.count_chunk(self._database, self._settings, batch, batch_id, chunk)
        self._write_rows(batch_id, position, chunk)

    def _write_rows(self, batch_id: int, position: int, chunk: Chunk) -> None:
        expires = now().timestamp() + self._settings.batch_expiry
        self._bulk.write(batch_id, expires, chunk.table(batch_id, position))

    def _commit_large(self, batch: Batch, batch_id: int) -> BatchOutcome:
        while True:
            try:
                return batches.commit_large(self._database, self._settings, batch, batch_id)
            except Overtaken:
                continue  # the winner's answer is there now

    def _abort(self, batch_id: int) -> None:
        try:
            batches.abort(self._database, batch_id)
        except TarnError as error:
            # It was never visible, and expires: the sweep takes it then.
            log.warning("an aborted batch is left to the sweep", batch=batch_id, problem=error.slug)

    def _commit_groups(self) -> None:
        while (group := self._next_group()) is not None:
            self._settle(group)

    def _next_group(self) -> list[tuple[BatchWithEvents, "Future[BatchOutcome]"]] | None:
        """Everything that waits, up to a sensible size; None when the writer closes."""
        taken = self._waiting.get()
        if taken is None:
            return None
        group, rows = [taken], len(taken[0].events)
        while rows < MOST_ROWS and len(group) < MOST_BATCHES:
            try:
                taken = self._waiting.get_nowait()
            except queue.Empty:
                break
            if taken is None:
                self._waiting.put(None)
                break
            group.append(taken)
            rows += len(taken[0].events)
        return group

    def _settle(self, group: list[tuple[BatchWithEvents, "Future[BatchOutcome]"]]) -> None:
        """One transaction for all; if that fails, one for each, so that nobody fails for another's sake.

        Unless nothing answers: each would wait for that again, and the last one for all of them.
        """
        if len(group) > 1:
            try:
                outcomes = self._write([sized for sized, _ in group])
            except Unavailable as error:
                for _, future in group:
                    future.set_exception(error)
                return
            except Exception as error:  # noqa: BLE001 - whatever it is, it is found again below, where it belongs
                log.info("a group is committed singly", batches=len(group), cause=type(error).__name__)
            else:
                for (_, future), outcome in zip(group, outcomes, strict=True):
                    future.set_result(outcome)
                return
        for sized, future in group:
            self._settle_alone(sized, future)

    def _settle_alone(self, sized: BatchWithEvents, future: "Future[BatchOutcome]") -> None:
        while True:
            try:
                outcome = self._write([sized])[0]
            except Overtaken:
                continue  # the winner's answer is there now
            except Exception as error:  # noqa: BLE001 - its client must hear of it, and the thread must live
                future.set_exception(error)
            else:
                future.set_result(outcome)
            return

    def _write(self, group: list[BatchWithEvents]) -> list[BatchOutcome]:
        with self._watch.commits.time(), self._database.write() as connection:
            outcomes = batches.write_small(connection, self._settings, group)
        self._watch.groups.observe(len(group))
        for sized, outcome in zip(group, outcomes, strict=True):
            if not outcome.replayed:
                self._watch.batches.observe(len(sized.events))
        return outcomes
