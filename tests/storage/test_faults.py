"""The store that injects faults into calls of another store."""

import inspect
from concurrent.futures import ThreadPoolExecutor

import pytest
from tarn.errors import Unavailable
from tarn.storage import fault_injection
from tarn.storage.fault_injection import Call, FaultyStore
from tarn.storage.store import ObjectMissing, Store

DOWN = Unavailable("down")


@pytest.fixture
def store(disk) -> Store:
    return Store(disk)


@pytest.fixture
def faulty(store) -> FaultyStore:
    return FaultyStore(store)


def test_without_faults_every_call_is_passed_on_and_recorded(faulty):
    faulty.put("a", b"1")
    faulty.put_new("b/c", b"2")
    faulty.put_stream("d", [b"34", b"5"])
    faulty.copy_new("a", "e")
    faulty.copy("b/c", "e")
    assert (faulty.get("e"), faulty.get_range("d", 1, 2), b"".join(faulty.stream("d", 1))) == (b"2", b"4", b"45")
    assert [entry.path for entry in faulty.list("")] == ["a", "b/c", "d", "e"]
    assert (list(faulty.folders("")), faulty.head("none")) == (["b"], None)
    faulty.sync(["a"])
    faulty.delete(["a", "d"])
    assert faulty.calls == [
        Call("put", "a"),
        Call("put_new", "b/c"),
        Call("put_stream", "d"),
        Call("copy_new", "e"),
        Call("copy", "e"),
        Call("get", "e"),
        Call("get_range", "d"),
        Call("stream", "d"),
        Call("list", ""),
        Call("folders", ""),
        Call("head", "none"),
        Call("sync", "a"),
        Call("delete", "a"),
        Call("delete", "d"),
    ]


def test_every_method_of_the_store_is_intercepted():
    public = {name for name, _ in inspect.getmembers(Store, inspect.isfunction) if not name.startswith("_")}
    assert public <= vars(FaultyStore).keys()


def test_failing_before_has_no_effect_and_failing_after_has_it(faulty, store):
    faulty.fail("put", "a", DOWN)
    faulty.fail("put", "b", DOWN, after=True)
    for path in ("a", "b"):
        with pytest.raises(Unavailable):
            faulty.put(path, b"1")
    assert store.get("b") == b"1"
    with pytest.raises(ObjectMissing):
        store.get("a")


def test_lost_response_may_have_been_a_conflict(faulty):
    faulty.fail("get", "none", DOWN, after=True)
    with pytest.raises(Unavailable):
        faulty.get("none")


def test_only_the_nth_matching_call_fails(faulty):
    faulty.fail("put", "*/manifest-*", DOWN, nth=2)
    faulty.put("ds/manifest-1", b"")
    faulty.put("ds/other", b"")
    with pytest.raises(Unavailable):
        faulty.put("ds/manifest-2", b"")
    faulty.put("ds/manifest-3", b"")


def test_every_call_from_the_nth_on_fails_until_healed(faulty):
    faulty.fail("get", "*", DOWN, nth=2, every=True)
    faulty.put("a", b"1")
    faulty.get("a")
    for _ in range(3):
        with pytest.raises(Unavailable):
            faulty.get("a")
    faulty.heal()
    assert faulty.get("a") == b"1"


@pytest.mark.parametrize("method", ["list", "stream"])
def test_iterators_fail_when_they_are_read(faulty, method):
    faulty.put("a", b"1")
    faulty.fail(method, "a", DOWN)
    iterator = getattr(faulty, method)("a")
    with pytest.raises(Unavailable):
        next(iterator)


@pytest.mark.parametrize(("after", "seen"), [(False, None), (True, b"1")])
def test_blocked_call_waits_before_or_after_its_effect_until_released(faulty, store, after, seen):
    gate = faulty.block("put", "a", after=after)
    with ThreadPoolExecutor(1) as pool:
        blocked = pool.submit(faulty.put, "a", b"1")
        gate.wait_arrived()
        assert not blocked.done()
        assert (store.get("a") if store.head("a") else None) == seen
        gate.release()
        blocked.result()
    assert store.get("a") == b"1"


def test_other_calls_pass_while_one_is_blocked(faulty):
    gate = faulty.block("put", "a")
    with ThreadPoolExecutor(1) as pool:
        blocked = pool.submit(faulty.put, "a", b"1")
        gate.wait_arrived()
        faulty.put("b", b"2")
        assert faulty.get("b") == b"2"
        gate.release()
        blocked.result()


def test_call_that_is_never_made_or_never_released_fails_instead_of_hanging(faulty, monkeypatch):
    monkeypatch.setattr(fault_injection, "TIMEOUT_SECONDS", 0.01)
    gate = faulty.block("put", "a")
    with pytest.raises(TimeoutError, match="never made"):
        gate.wait_arrived()
    with pytest.raises(TimeoutError, match="never released"):
        faulty.put("a", b"1")


def test_delayed_call_has_its_effect_after_the_delay(faulty, store):
    faulty.delay("put", "a", 0.001)
    faulty.put("a", b"1")
    assert store.get("a") == b"1"
