"""Verify of a lake on a real S3 server."""

from pathlib import Path

import pytest
from tarn.db.engine import Database
from tarn.model.datasets.finding import FindingKind
from tarn.settings import Settings
from tarn.storage.store import Store

from tests.integrity.lakes import rich_lake
from tests.pipeline.kernels import DirectKernels
from tests.s3 import S3Server


@pytest.fixture
def settings(s3: S3Server, database_url: str, tmp_path: Path) -> Settings:
    return s3.settings(database_url=database_url, admin_key_file=tmp_path / "admin.key")


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_lake_on_s3_is_verified_and_a_lost_manifest_rebuilt(
    settings: Settings, database: Database, store: Store, kernels: DirectKernels
):
    lake = rich_lake(settings, database, store, kernels)
    assert lake.verify().findings == []
    live = lake.live()
    store.delete([lake.dataset.layout.snapshot(11), lake.path("statements", lake.manifest(6).statements.files[0])])

    result = lake.verify(repair=True)

    findings = {(finding.kind, finding.repaired) for finding in result.findings}
    assert findings == {(FindingKind.MANIFEST_MISSING, True), (FindingKind.FILE_MISSING, False)}
    assert lake.live() == live
