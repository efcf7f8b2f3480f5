"""Views: states that are resolved once, with a bounded cache of manifests."""

import pytest
from tarn.datasets.registry import Dataset
from tarn.query import views
from tarn.query.views import Views

from tests.in_process_api import InProcessApi


def test_cache_of_manifests_is_bounded_and_always_has_the_newest(
    api: InProcessApi, dataset: Dataset, flush, monkeypatch: pytest.MonkeyPatch
):
    for name in ("a", "b", "c"):
        api.admin.post("/v1/datasets/test/entities", {"id": name, "schema": "Person"})
        flush()
    monkeypatch.setattr(views, "MAX_FILES", 5)
    resolved = Views(api.services.database, api.services.store, 0)

    # Each flush adds a file to either table: 2, 4 and 6 of them.
    shown = [resolved.at(dataset, str(seq)).snapshot for seq in (1, 2, 3)]
    again = [resolved.at(dataset, str(seq)).snapshot for seq in (3, 1, 3)]

    assert [snapshot.seq for snapshot in shown] == [1, 2, 3]
    assert again[0] is shown[2]
    assert again[1] is not shown[0]
    assert again[2] == shown[2]
