"""Exports of a lake on a real S3 server."""

from pathlib import Path

import pytest
from tarn.datasets.registry import Dataset
from tarn.model.export import Kind
from tarn.model.job import MakeOptions
from tarn.settings import Settings

from tests.in_process_api import ONE_DATABASE, InProcessApi
from tests.pipeline.kernels import DirectKernels
from tests.pipeline.test_export import exports_of, fetched, freshness, person, write
from tests.pipeline.test_rewrite import ignore
from tests.s3 import S3Server


@pytest.fixture
def settings(s3: S3Server, database_url: str, tmp_path: Path) -> Settings:
    return s3.settings(database_url=database_url, admin_key_file=tmp_path / "admin.key")


@ONE_DATABASE
def test_exports_on_s3_are_what_reads_show_also_in_parts(
    house: InProcessApi, dataset: Dataset, kernels: DirectKernels, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tarn.pipeline.jobs.split_ranges.WORTH_A_FILE", 20)
    write(house, *(person(f"p{number:03}", country=["de", "fr"]) for number in range(100)))
    exporting = exports_of(house, kernels)
    exporting.make(dataset, MakeOptions(), ignore)
    write(house, person("zoe"))

    done = exporting.make(dataset, MakeOptions(), ignore)

    assert [one.kind for one in done.made] == list(Kind)
    content = fetched(house, "entities.ftm.json")
    assert content == house.admin.get("/v1/datasets/test/entities/stream").content
    part = house.admin.get("/v1/datasets/test/exports/entities.ftm.json", headers={"Range": "bytes=-10"})
    assert (part.status_code, part.content) == (206, content[-10:])
    assert fetched(house, "entities.delta.json").count(b"\n") == 1
    assert set(freshness(house).values()) == {None}
    assert list(house.services.store.list(dataset.layout.export_parts)) == []
