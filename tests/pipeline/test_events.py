"""What is told of a dataset: each snapshot and export once, by whoever made it."""

import json
from typing import Any

import pytest
from tarn.datasets.registry import Dataset
from tarn.db import outbox as events
from tarn.lake import snapshots
from tarn.lake.commit import SnapshotPublisher
from tarn.model.export import Kind
from tarn.model.job import MakeOptions
from tarn.pipeline.jobs.flush import Flush

from tests.in_process_api import ONE_DATABASE, InProcessApi
from tests.pipeline.kernels import DirectKernels
from tests.pipeline.test_export import exports_of, person, write
from tests.pipeline.test_rewrite import ignore

pytestmark = ONE_DATABASE


class Died(BaseException):
    """A process is no more."""


def events_of(house: InProcessApi, dataset: Dataset) -> list[dict[str, Any]]:
    with house.services.database.read() as connection:
        return [json.loads(each.body) for each in events.after(connection, dataset.id, 0, 100).told]


def test_snapshot_is_told_once_though_its_publisher_died_before_it_could(
    house: InProcessApi, dataset: Dataset, kernels: DirectKernels
):
    services = house.services

    def publisher(reached: Any = lambda _: None) -> SnapshotPublisher:
        return SnapshotPublisher(services.database, services.store, services.settings, "tester", reached)

    def die(step: str) -> None:
        if step == "manifest put":
            raise Died

    write(house, person("ann"))
    with pytest.raises(Died):
        Flush(services.database, services.store, publisher(die), lambda: kernels).run([dataset], lambda: None)
    before = [event["kind"] for event in events_of(house, dataset)]
    for _ in range(2):
        publisher().recover(dataset)

    with services.database.read() as connection:
        head = snapshots.recorded(connection, dataset)
    assert before == ["dataset.created"]
    (made,) = events_of(house, dataset)[1:]
    assert (made["kind"], made["snapshot"], made["seq"]) == ("snapshot.published", head.id, head.seq)
    assert (made["content"], made["operation"]) == (head.seq, "flush")


def test_exports_are_told_when_they_are_made_and_not_when_they_are_left_as_they_are(
    house: InProcessApi, dataset: Dataset, kernels: DirectKernels
):
    write(house, person("ann"))
    exporting = exports_of(house, kernels)

    exporting.make(dataset, MakeOptions(), ignore)
    made = [event for event in events_of(house, dataset) if event["kind"] == "export.made"]
    exporting.make(dataset, MakeOptions(), ignore)
    again = [event for event in events_of(house, dataset) if event["kind"] == "export.made"]

    assert [event["export"] for event in made] == list(Kind)
    assert {event["snapshot"] for event in made} == {events_of(house, dataset)[1]["snapshot"]}
    assert again == made
