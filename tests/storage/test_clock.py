"""The clock of a store, derived from the timestamps of objects that it writes."""

from tarn.storage.store_clock import store_time


def test_earlier_object_is_not_newer_than_the_clock_and_no_probe_is_left(store):
    store.put("before", b"")
    moment = store_time(store)
    [before] = store.list("")
    assert (before.path, before.modified <= moment) == ("before", True)


def test_clock_advances(store):
    assert store_time(store) <= store_time(store)
