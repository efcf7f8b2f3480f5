"""Streams: the command prints complete lines, and its exit code shows whether the stream was complete."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from tarn.cli.output.streams import limited
from tarn_client import IncompleteResponse, Problem
from tarn_client.ndjson import record_blocks

from tests.cli.conftest import Tarn

PROBLEM = {"type": "/problems/internal", "title": "t", "status": 500, "detail": "the stream failed halfway"}


@pytest.fixture
def stream_server() -> Iterator[Callable[[bytes], str]]:
    """Return a function that makes a server send these bytes as every stream, and returns its URL."""
    body = b""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/x-ndjson")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    def serve(content: bytes) -> str:
        nonlocal body
        body = content
        return f"http://127.0.0.1:{server.server_port}"

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield serve
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("last", "code", "error"),
    [
        (b'{"$end": {"snapshot": null, "count": 1}}\n', 0, ""),
        (b'{"$error": ' + json.dumps(PROBLEM).encode() + b"}\n", 1, "tarn: the stream failed halfway (internal)\n"),
        (b"", 3, "tarn: the stream ended without its last line: the data received is incomplete\n"),
        (b'{"id": "b', 3, "tarn: the stream ended without its last line: the data received is incomplete\n"),
    ],
)
def test_last_line_of_a_stream_is_not_printed_and_determines_the_exit_code(
    stream_server: Callable[[bytes], str], last: bytes, code: int, error: str
):
    url = stream_server(b'{"id": "a"}\n' + last)

    result = Tarn(url, "key")("entities", "query", "any", code=code)

    assert (result.stdout, result.stderr) == ('{"id": "a"}\n', error)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_blocks_are_complete_lines_independent_of_chunks(size: int):
    body = b'{"id":"a{\\"$b"}\n{"id":"c"}\n{"$end":{"count":2}}\n'
    chunks = [body[start : start + size] for start in range(0, len(body), size)]

    blocks = [block for block in record_blocks(chunks) if block]

    assert b"".join(blocks) == b'{"id":"a{\\"$b"}\n{"id":"c"}\n'
    assert all(block.endswith(b"\n") for block in blocks)


def test_records_before_an_error_are_yielded_before_it_is_raised():
    stream = record_blocks([b'{"id":"a"}\n{"$error":' + json.dumps(PROBLEM).encode() + b"}\n"])

    assert next(stream) == b'{"id":"a"}\n'
    with pytest.raises(Problem, match="failed halfway"):
        next(stream)


def test_stream_without_its_last_line_is_incomplete():
    with pytest.raises(IncompleteResponse, match="is incomplete"):
        list(record_blocks([b'{"id":"a"}\n']))


@pytest.mark.parametrize(("limit", "expected"), [(None, b"a\nb\nc\n"), (1, b"a\n"), (2, b"a\nb\n"), (9, b"a\nb\nc\n")])
def test_limit_counts_lines_across_blocks(limit: int | None, expected: bytes):
    assert b"".join(limited([b"a\nb\n", b"", b"c\n"], limit)) == expected
