"""Statements: timestamps at the limits of the supported years."""

import pytest
from tarn.model.ftm.statement import InvalidRecord, microseconds
from tarn.model.timestamps import FIRST_MOMENT, LAST_MOMENT


def test_first_and_last_timestamp_are_parsed():
    assert microseconds("0001-01-01T00:00:00Z", "first_seen") == FIRST_MOMENT
    assert microseconds("9999-12-31T23:59:59.999999Z", "last_seen") == LAST_MOMENT


@pytest.mark.parametrize("moment", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-01:00"])
def test_timestamp_whose_offset_moves_it_out_of_range_is_refused(moment: str):
    with pytest.raises(InvalidRecord) as refused:
        microseconds(moment, "first_seen")

    assert refused.value.field == "first_seen"
