"""Exports of a lake on a real S3 server."""

from pathlib import Path

import pytest
from tarn.datasets.registry import Dataset
from tarn.model.datasets.export import ExportKind
from tarn.model.work.job import MakeOptions
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
def test_exports_on_s3_equal_reads_also_in_parts(
    api: InProcessApi, dataset: Dataset, kernels: DirectKernels, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tarn.pipeline.jobs.split_ranges.WORTH_A_FILE", 20)
    write(api, *(person(f"p{number:03}", country=["de", "fr"]) for number in range(100)))
    exporting = exports_of(api, kernels)
    exporting.make(dataset, MakeOptions(), ignore)
    write(api, person("zoe"))

    done = exporting.make(dataset, MakeOptions(), ignore)

    assert [one.kind for one in done.made] == list(ExportKind)
    content = fetched(api, "entities.ftm.json")
    assert content == api.admin.get("/v1/datasets/test/entities/stream").content
    part = api.admin.get("/v1/datasets/test/exports/entities.ftm.json", headers={"Range": "bytes=-10"})
    assert (part.status_code, part.content) == (206, content[-10:])
    assert fetched(api, "entities.delta.json").count(b"\n") == 1
    assert set(freshness(api).values()) == {None}
    assert list(api.services.store.list(dataset.layout.export_parts)) == []
