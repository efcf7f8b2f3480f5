"""Metadata: values that no manifest can hold are refused when they are received."""

from typing import Any

import pytest
from pydantic import ValidationError
from tarn.model.datasets.stage import NewStage


@pytest.mark.contract("M8")
@pytest.mark.parametrize("metadata", [{"a": "\ud800"}, {"a": [{"b": "x\udfff"}]}, {"\ud800": 1}])
def test_unpaired_surrogate_is_refused(metadata: dict[str, Any]):
    with pytest.raises(ValidationError):
        NewStage(metadata=metadata)


def test_text_beyond_the_basic_plane_is_unchanged():
    assert NewStage(metadata={"a": "\U0001f600"}).metadata == {"a": "\U0001f600"}
