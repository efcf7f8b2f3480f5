"""Messages between processes: binary data, and the size limit of messages from processes that are not trusted."""

import pytest
from tarn.child_process import JSON, PICKLE, MessageConnection

LIMIT = 100


@pytest.mark.parametrize(("message", "data"), [("x" * LIMIT, b""), ("x", b"x" * (LIMIT + 1))])
def test_message_above_the_size_limit_is_refused(message: str, data: bytes):
    sender, receiver = MessageConnection.pair(JSON._replace(max_bytes=LIMIT))
    with sender, receiver:
        sender.send(message, data)
        with pytest.raises((OSError, EOFError)):
            receiver.receive()


def test_message_within_the_size_limit_is_received_with_its_data():
    sender, receiver = MessageConnection.pair(JSON._replace(max_bytes=LIMIT))
    with sender, receiver:
        sender.send("x", b"y" * LIMIT)
        message, data = receiver.receive()
        assert (message, bytes(data)) == ("x", b"y" * LIMIT)


def test_only_messages_of_parsers_are_limited_in_size():
    # A query may return a page of rows with long texts, which is larger than any message of a parser.
    assert JSON.max_bytes is not None
    assert PICKLE.max_bytes is None
