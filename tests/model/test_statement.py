"""Statements: moments at the ends of time."""

import pytest
from tarn.model.statement import InvalidRecord, microseconds
from tarn.model.timestamps import FIRST_MOMENT, LAST_MOMENT


def test_first_and_last_moment_are_read():
    assert microseconds("0001-01-01T00:00:00Z", "first_seen") == FIRST_MOMENT
    assert microseconds("9999-12-31T23:59:59.999999Z", "last_seen") == LAST_MOMENT


@pytest.mark.parametrize("moment", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-01:00"])
def test_moment_that_an_offset_puts_outside_of_all_years_is_refused(moment: str):
    with pytest.raises(InvalidRecord) as refused:
        microseconds(moment, "first_seen")

    assert refused.value.field == "first_seen"
