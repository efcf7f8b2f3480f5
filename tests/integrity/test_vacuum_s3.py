"""Vacuum of a lake on a real S3 server."""

from pathlib import Path

import pytest
from tarn.settings import Settings

from tests.faults.checks import check_now
from tests.faults.scene import Scene
from tests.in_process_api import ONE_DATABASE
from tests.integrity.vacuums import assert_clean, states, vacuum, with_garbage
from tests.s3 import S3Server


@pytest.fixture
def settings(s3: S3Server, database_url: str, tmp_path: Path) -> Settings:
    return s3.settings(database_url=database_url, admin_key_file=tmp_path / "admin.key")


@ONE_DATABASE
def test_vacuum_on_s3_leaves_exactly_the_files_of_kept_snapshots(scene: Scene):
    with_garbage(scene, 8)
    before = states(scene)

    done = vacuum(scene, keep_from=9)

    after = states(scene)
    assert list(after) == [9, 10, 11]
    assert {seq: before[seq] for seq in (9, 10)} == {seq: after[seq] for seq in (9, 10)}
    assert done.files > 10
    assert_clean(scene)
    check_now(scene)
    scene.flush()
    check_now(scene)
