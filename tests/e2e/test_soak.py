"""Short soak test: writers, readers and maintenance run concurrently, and the final lake equals the writers' model."""

from pathlib import Path

import pytest

from bench.soak import MAINTENANCE, MAX_FILES, soak

pytestmark = pytest.mark.long


@pytest.mark.xdist_group("spark")
def test_concurrent_writes_reads_and_maintenance_end_in_the_state_of_the_model(tmp_path: Path):
    result = soak(tmp_path, seconds=25, sample_every=5, vacuum_every=6)

    assert result.faults == []
    assert result.differing == []
    assert result.failed == []
    assert result.errors == []
    assert result.verified["findings"] == []
    assert result.times.keys() >= {"add", "put", "delete", "delete_statement", "one", "page", "vacuum_at_once"}
    assert sum(result.automatic[operation] for operation in MAINTENANCE) > 0
    assert max(sample.files for sample in result.samples) < MAX_FILES
