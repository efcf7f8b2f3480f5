"""Events of a dataset: each snapshot and export is reported once."""

import json
from typing import Any

import pytest
from tarn.datasets.head import recorded_head
from tarn.datasets.registry import Dataset
from tarn.db import outbox
from tarn.lake.commit import SnapshotPublisher
from tarn.model.datasets.export import ExportKind
from tarn.model.work.job import MakeOptions
from tarn.pipeline.jobs.flush import Flush

from tests.in_process_api import ONE_DATABASE, InProcessApi
from tests.pipeline.kernels import DirectKernels
from tests.pipeline.test_export import exports_of, person, write
from tests.pipeline.test_rewrite import ignore

pytestmark = ONE_DATABASE


class Killed(BaseException):
    """The process is killed here."""


def events_of(api: InProcessApi, dataset: Dataset) -> list[dict[str, Any]]:
    with api.services.database.read() as connection:
        return [json.loads(each.body) for each in outbox.after(connection, dataset.id, 0, 100).events]


def test_snapshot_event_is_recorded_once_although_its_publisher_died_before(
    api: InProcessApi, dataset: Dataset, kernels: DirectKernels
):
    services = api.services

    def publisher(reached: Any = lambda _: None) -> SnapshotPublisher:
        return SnapshotPublisher(services.database, services.store, services.settings, "tester", reached)

    def die(step: str) -> None:
        if step == "manifest put":
            raise Killed

    write(api, person("ann"))
    with pytest.raises(Killed):
        Flush(services.database, services.store, publisher(die), lambda: kernels).run([dataset], lambda: None)
    before = [event["kind"] for event in events_of(api, dataset)]
    for _ in range(2):
        publisher().recover(dataset)

    with services.database.read() as connection:
        head = recorded_head(connection, dataset)
    assert before == ["dataset.created"]
    (published,) = events_of(api, dataset)[1:]
    assert (published["kind"], published["snapshot"], published["seq"]) == ("snapshot.published", head.id, head.seq)
    assert (published["content"], published["operation"]) == (head.seq, "flush")


def test_exports_are_reported_when_generated_and_not_when_still_fresh(
    api: InProcessApi, dataset: Dataset, kernels: DirectKernels
):
    write(api, person("ann"))
    exporting = exports_of(api, kernels)

    exporting.make(dataset, MakeOptions(), ignore)
    exported = [event for event in events_of(api, dataset) if event["kind"] == "export.made"]
    exporting.make(dataset, MakeOptions(), ignore)
    exported_again = [event for event in events_of(api, dataset) if event["kind"] == "export.made"]

    assert [event["export"] for event in exported] == list(ExportKind)
    assert {event["snapshot"] for event in exported} == {events_of(api, dataset)[1]["snapshot"]}
    assert exported_again == exported
