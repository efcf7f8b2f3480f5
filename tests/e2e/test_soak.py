"""The soak, short: writers, readers and maintenance at once, and in the end the lake is what its writers know."""

from pathlib import Path

import pytest

from bench.soak import MAINTENANCE, MAX_FILES, soak


@pytest.mark.xdist_group("spark")
def test_what_is_written_read_and_maintained_at_once_ends_as_its_writers_know_it(tmp_path: Path):
    soaked = soak(tmp_path, seconds=25, sample_every=5, vacuum_every=6)

    assert soaked.faults == []
    assert soaked.differing == []
    assert soaked.failed == []
    assert soaked.errors == []
    assert soaked.verified["findings"] == []
    assert soaked.times.keys() >= {"add", "put", "delete", "delete_statement", "one", "page", "vacuum_at_once"}
    assert sum(soaked.unasked[operation] for operation in MAINTENANCE) > 0
    assert max(sample.files for sample in soaked.samples) < MAX_FILES
