"""Journal writer: group commit of small batches, chunked bulk inserts of large ones."""

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import structlog

from tarn.db.engine import Database
from tarn.db.idempotency import IdempotencyRace
from tarn.errors import TarnError, Unavailable
from tarn.journal import batches
from tarn.journal.batches import Batch, BatchOutcome, BatchWithEvents
from tarn.journal.bulk import Bulk, bulk_for
from tarn.journal.formats.counting import require_equal
from tarn.journal.parsing.event_buffer import Chunk, Events
from tarn.model.ids import now
from tarn.settings import Settings
from tarn.telemetry import Telemetry

log = structlog.get_logger(__name__)

MOST_ROWS = 20_000
MOST_BATCHES = 256
"""Maximum rows and batches of one group commit."""


FEW_ROWS = 2_000
"""Maximum rows of a small batch. A larger one is written by bulk insert even if it is one chunk: inserting row by row
is Python work, and the thread has to reacquire the GIL after each row."""


class Writer:
    """Writer of batches, one per process.

    Group commit: one thread commits all queued small batches in one transaction, so that many clients share one fsync;
    meanwhile the next ones queue up. A large batch is written by its caller, with one chunk of write-behind: the next
    chunk is parsed while the previous one is written.
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
        """Queue a small batch; the future resolves when it is durable, or has the error. Empty ones are not written."""
        future: Future[BatchOutcome] = Future()
        if not len(events) and not batch.rows:
            future.set_result(BatchOutcome(batch.answer))
            return future
        self._waiting.put((BatchWithEvents(batch, events), future))
        return future

    def write_body(self, batch: Batch, chunks: Iterator[Chunk], finished: Callable[[], Batch]) -> BatchOutcome:
        """Write a body as one batch while it is read; on any error the batch is aborted.

        `finished` returns the batch with its response, and is called after all chunks have been read.
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
        """Write all queued batches, then stop."""
        self._waiting.put(None)
        self._thread.join()
        self._bulk.close()

    def _replayed(self, batch: Batch) -> BatchOutcome | None:
        """Return the stored response of a repeated request. Called before limits are checked, as they do not apply."""
        if batch.once is None:
            return None
        with self._database.read() as connection:
            return batches.replay(connection, batch)

    def _write_behind(
        self, batch: Batch, batch_id: int, first: Chunk, second: Chunk, remaining: Iterator[Chunk]
    ) -> int:
        """Write chunks, each while the next one is read. Return the number of rows."""
        with ThreadPoolExecutor(1, thread_name_prefix="chunk") as pool:
            pending, position = pool.submit(self._write_rows, batch_id, 0, first), len(first)
            for chunk in itertools.chain((second,), remaining):
                pending.result()
                pending = pool.submit(self._write_chunk, batch, batch_id, position, chunk)
                position += len(chunk)
            pending.result()
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
            except IdempotencyRace:
                continue  # the other request's response is stored now

    def _abort(self, batch_id: int) -> None:
        try:
            batches.abort(self._database, batch_id)
        except TarnError as error:
            # It was never visible, and the sweep deletes it after it has expired.
            log.warning("batch not aborted, the sweep will delete it", batch=batch_id, problem=error.slug)

    def _commit_groups(self) -> None:
        while (group := self._next_group()) is not None:
            self._settle(group)

    def _next_group(self) -> list[tuple[BatchWithEvents, "Future[BatchOutcome]"]] | None:
        """Return all queued batches up to the size limit, waiting for the first; None when the writer closes."""
        entry = self._waiting.get()
        if entry is None:
            return None
        group, rows = [entry], len(entry[0].events)
        while rows < MOST_ROWS and len(group) < MOST_BATCHES:
            try:
                entry = self._waiting.get_nowait()
            except queue.Empty:
                break
            if entry is None:
                self._waiting.put(None)
                break
            group.append(entry)
            rows += len(entry[0].events)
        return group

    def _settle(self, group: list[tuple[BatchWithEvents, "Future[BatchOutcome]"]]) -> None:
        """Commit a group in one transaction; if that fails, each batch in its own, to isolate the failing one.

        Except if the database is unavailable: then all fail, because each retry would wait for the timeout again.
        """
        if len(group) > 1:
            try:
                outcomes = self._write([sized for sized, _ in group])
            except Unavailable as error:
                for _, future in group:
                    future.set_exception(error)
                return
            except Exception as error:  # noqa: BLE001 - the batch that caused it raises it again below
                log.info(
                    "group commit failed, committing batches singly", batches=len(group), reason=type(error).__name__
                )
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
            except IdempotencyRace:
                continue  # the other request's response is stored now
            except Exception as error:  # noqa: BLE001 - passed to the client; the thread must continue
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
