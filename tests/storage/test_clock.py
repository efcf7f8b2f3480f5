from tarn.storage.store_clock import store_time


def test_what_was_written_before_is_not_younger_and_nothing_is_left_behind(store):
    store.put("before", b"")
    moment = store_time(store)
    [before] = store.list("")
    assert (before.path, before.modified <= moment) == ("before", True)


def test_it_goes_on(store):
    assert store_time(store) <= store_time(store)
