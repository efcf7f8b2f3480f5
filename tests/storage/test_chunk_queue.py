"""Chunks of an asynchronous source, passed to a sender in a thread."""

from threading import Event

import pytest
from tarn.storage.chunk_queue import AHEAD, SourceAborted, pump


def test_chunks_arrive_in_order_and_are_counted():
    arrived: list[bytes] = []
    assert pump([b"a", b"bc", b""], lambda chunks: arrived.extend(chunks)) == 3
    assert arrived == [b"a", b"bc", b""]


def test_source_is_read_ahead_only_up_to_the_limit():
    read = []
    go = Event()

    def source():
        for number in range(100):
            read.append(number)
            if number == AHEAD + 1:
                go.set()
            yield b"x"

    def send(chunks):
        next(chunks)
        assert go.wait(10)
        assert len(read) <= AHEAD + 2
        for _ in chunks:
            pass

    assert pump(source(), send) == 100


def test_failing_source_abandons_the_sender_and_its_error_is_raised():
    errors = []

    def source():
        yield b"x"
        raise ValueError("broken")

    def send(chunks):
        try:
            list(chunks)
        except SourceAborted as error:
            errors.append(error)
            raise

    with pytest.raises(ValueError, match="broken"):
        pump(source(), send)
    assert len(errors) == 1


@pytest.mark.parametrize("before", [0, 1, 10])
def test_failing_sender_stops_an_endless_source(before):
    def source():
        while True:
            yield b"x"

    def send(chunks):
        for _ in range(before):
            next(chunks)
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        pump(source(), send)
