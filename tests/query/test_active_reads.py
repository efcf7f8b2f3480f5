"""Active reads, and the reports of the oldest snapshot that they use."""

from collections.abc import Callable

import pytest
from tarn.datasets.registry import Dataset
from tarn.db import reader_heartbeats
from tarn.db.engine import Database
from tarn.db.reader_heartbeats import ReaderHeartbeat
from tarn.errors import SnapshotNotFound
from tarn.lake.active_readers import UNKNOWN, oldest_reported, oldest_running
from tarn.model.datasets.snapshot import Snapshot
from tarn.query.engine.active_reads import ActiveReadReporter, ActiveReads
from tarn.query.reader import Reader, RequestedState
from tarn.settings import Settings

from tests.in_process_api import InProcessApi

Flushing = Callable[[], list[Snapshot]]

TEST = Dataset("d", "test")  # type: ignore[arg-type]  # its folder is not used


def reports(database: Database) -> list[ReaderHeartbeat]:
    with database.read() as connection:
        return list(reader_heartbeats.latest(connection).values())


def record_report(database: Database, reader: str, beat: int, **oldest: int) -> None:
    with database.write() as connection:
        reader_heartbeats.beat(connection, reader, ReaderHeartbeat(beat, oldest))


def test_read_is_unknown_until_it_is_resolved_and_then_the_oldest_counts():
    running = ActiveReads()
    first, second, other = running.begin("a"), running.begin("a"), running.begin("b")
    begun = running.oldest()
    first.seq, second.seq = 7, 5

    resolved = running.oldest()
    running.end(second)
    running.end(other)

    assert begun == {"a": UNKNOWN, "b": UNKNOWN}
    assert resolved == {"a": 5, "b": UNKNOWN}
    assert running.oldest() == {"a": 7}


def test_reader_registers_its_snapshot_until_the_read_ends(api: InProcessApi, dataset: Dataset, flush: Flushing):
    for name in ("a", "b"):
        api.admin.post("/v1/datasets/test/entities", {"id": name, "schema": "Person"})
        flush()
    reader: Reader = api.services.reader

    with reader.reading() as reading:
        before = reader.active_reads.oldest()
        reading.view(dataset, RequestedState())
        head = reader.active_reads.oldest()
        reading.view(dataset, RequestedState(at="1"))
        both = reader.active_reads.oldest()
    after = reader.active_reads.oldest()
    with pytest.raises(SnapshotNotFound), reader.reading() as reading:
        reading.view(dataset, RequestedState(at="9"))

    assert (before, head, both, after) == ({}, {dataset.id: 2}, {dataset.id: 1}, {})
    assert reader.active_reads.oldest() == {}


def test_process_reports_before_it_serves_and_keeps_its_report_while_reads_continue(
    api: InProcessApi, database: Database, settings: Settings
):
    assert [report.oldest for report in reports(database)] == [{}]
    running = ActiveReads()
    with ActiveReadReporter(database, running, 1000) as reporter:
        running.begin("d").seq = 3
        reporter.report()
        assert ReaderHeartbeat(2, {"d": 3}) in reports(database)
        assert oldest_reported(database, TEST) == 3
    reports_after_exit = reports(database)
    running.end(next(iter(running._active)))
    with ActiveReadReporter(database, running, 1000):
        pass

    assert ReaderHeartbeat(2, {"d": 3}) in reports_after_exit, "threads may still read"
    assert len(reports(database)) == len(reports_after_exit)


@pytest.mark.parametrize(
    ("beats", "waits"),
    [
        ([3], True),  # its report may have been collected before the request
        ([3, 4], False),
        ([4], False),
    ],
)
def test_wait_for_readers_ends_after_two_reports_or_one_collected_after_the_request(
    database: Database, settings: Settings, beats: list[int], waits: bool
):
    record_report(database, "one", 2, d=8)
    remaining = iter(beats)

    def report_next(_: object) -> None:
        if (beat := next(remaining, None)) is not None:
            record_report(database, "one", beat, d=5)

    quick = settings.model_copy(update={"reader_heartbeat": 0.004, "reader_silent_after": 0.05 if waits else 30})

    oldest = oldest_running(database, quick, TEST, report_next)

    assert oldest == (None if waits else 5)
    assert len(reports(database)) == (0 if waits else 1), "processes without reports for too long are removed"


def test_without_processes_there_is_no_wait(database: Database, settings: Settings):
    def never(_: object) -> None:
        raise AssertionError

    assert oldest_running(database, settings, TEST, never) is None
