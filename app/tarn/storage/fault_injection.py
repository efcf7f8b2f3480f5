"""Fault-injecting store for tests: fails, delays or blocks chosen calls, before or after they took effect.

A test that blocks a call waits until it has arrived and releases it; nothing here is timed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from fnmatch import fnmatchcase
from threading import Event, Lock

from tarn.storage.store import CHUNK, Entry, Store

TIMEOUT_SECONDS = 30.0
"""Seconds after which a waiting test, or a blocked call that is not released, fails instead of hanging."""


@dataclass(frozen=True)
class Call:
    method: str
    path: str


@dataclass
class Gate:
    """Controls a blocked call in a test."""

    _arrived: Event = field(default_factory=Event)
    _released: Event = field(default_factory=Event)

    def wait_arrived(self) -> None:
        """Return once the call is blocked. Raises TimeoutError if it is never made."""
        if not self._arrived.wait(TIMEOUT_SECONDS):
            raise TimeoutError("the call that should be blocked was never made")

    def release(self) -> None:
        """Unblock the call; if it has not been made yet, it will not block."""
        self._released.set()

    def hold(self) -> None:
        self._arrived.set()
        if not self._released.wait(TIMEOUT_SECONDS):
            raise TimeoutError("a blocked call was never released")


@dataclass
class _Fault:
    method: str
    glob: str
    nth: int
    every: bool
    after: bool
    act: Callable[[], None]
    seen: int = 0

    def fires(self, method: str, paths: Sequence[str]) -> bool:
        """Return whether the fault applies to this call; every matching call is counted."""
        if self.method != method or not any(fnmatchcase(path, self.glob) for path in paths):
            return False
        self.seen += 1
        return self.seen >= self.nth if self.every else self.seen == self.nth


class FaultyStore(Store):
    """A Store that behaves like the one it wraps but for the faults set on it. `calls` has every call, in order.

    `glob` is matched against the whole path, `*` crossing slashes; for a copy the path is the target. `nth` counts
    matching calls from 1 on; with `every`, all calls from the nth on are hit. `after` means that the call took effect
    and its response was lost.
    """

    def __init__(self, inner: Store) -> None:
        self.connection = inner.connection
        self.calls: list[Call] = []
        self._inner = inner
        self._faults: list[_Fault] = []
        self._lock = Lock()

    def fail(
        self, method: str, glob: str, error: BaseException, *, nth: int = 1, every: bool = False, after: bool = False
    ) -> None:
        """Raise `error` from the call."""

        def act() -> None:
            raise error

        self._add(_Fault(method, glob, nth, every, after, act))

    def delay(
        self, method: str, glob: str, seconds: float, *, nth: int = 1, every: bool = False, after: bool = False
    ) -> None:
        """Delay the call, as a slow store would. Not a way to make a test wait."""

        def act() -> None:
            Event().wait(seconds)

        self._add(_Fault(method, glob, nth, every, after, act))

    def block(self, method: str, glob: str, *, nth: int = 1, after: bool = False) -> Gate:
        """Hold the call until the test releases it."""
        gate = Gate()
        self._add(_Fault(method, glob, nth, every=False, after=after, act=gate.hold))
        return gate

    def heal(self) -> None:
        """Remove every fault. Blocked calls stay blocked."""
        with self._lock:
            self._faults.clear()

    def _add(self, fault: _Fault) -> None:
        with self._lock:
            self._faults.append(fault)

    @contextmanager
    def _call(self, method: str, *paths: str) -> Iterator[None]:
        with self._lock:
            self.calls += [Call(method, path) for path in paths]
            firing = [fault for fault in self._faults if fault.fires(method, paths)]
        for fault in firing:
            if not fault.after:
                fault.act()
        try:
            yield
        finally:
            for fault in firing:
                if fault.after:
                    fault.act()

    def get(self, path: str) -> bytes:
        with self._call("get", path):
            return self._inner.get(path)

    def get_range(self, path: str, start: int, end: int) -> bytes:
        with self._call("get_range", path):
            return self._inner.get_range(path, start, end)

    def stream(self, path: str, start: int = 0, end: int | None = None, chunk_size: int = CHUNK) -> Iterator[bytes]:
        with self._call("stream", path):
            yield from self._inner.stream(path, start, end, chunk_size)

    def open(self, path: str, start: int = 0, end: int | None = None) -> tuple[Entry, Iterator[bytes]]:
        with self._call("open", path):
            return self._inner.open(path, start, end)

    def head(self, path: str) -> Entry | None:
        with self._call("head", path):
            return self._inner.head(path)

    def list(self, prefix: str, after: str | None = None) -> Iterator[Entry]:
        with self._call("list", prefix):
            yield from self._inner.list(prefix, after)

    def folders(self, prefix: str) -> Sequence[str]:
        with self._call("folders", prefix):
            return self._inner.folders(prefix)

    def put(self, path: str, data: bytes) -> None:
        with self._call("put", path):
            self._inner.put(path, data)

    def put_hint(self, path: str, data: bytes) -> None:
        with self._call("put_hint", path):
            self._inner.put_hint(path, data)

    def put_new(self, path: str, data: bytes) -> None:
        with self._call("put_new", path):
            self._inner.put_new(path, data)

    def place(self, path: str, data: bytes) -> None:
        with self._call("place", path):
            self._inner.place(path, data)

    def put_stream(self, path: str, chunks: Iterable[bytes], durable: bool = True) -> int:
        with self._call("put_stream", path):
            return self._inner.put_stream(path, chunks, durable)

    def copy(self, source: str, target: str) -> None:
        with self._call("copy", target):
            self._inner.copy(source, target)

    def copy_new(self, source: str, target: str) -> None:
        with self._call("copy_new", target):
            self._inner.copy_new(source, target)

    def place_copy(self, source: str, target: str) -> None:
        with self._call("place_copy", target):
            self._inner.place_copy(source, target)

    def delete(self, paths: Iterable[str]) -> None:
        named = [*paths]
        with self._call("delete", *named):
            self._inner.delete(named)

    def sweep_unfinished(self, prefix: str, before: datetime) -> None:
        with self._call("sweep_unfinished", prefix):
            self._inner.sweep_unfinished(prefix, before)

    def sync(self, paths: Iterable[str], above: bool = True) -> None:
        named = [*paths]
        with self._call("sync", *named):
            self._inner.sync(named, above)
