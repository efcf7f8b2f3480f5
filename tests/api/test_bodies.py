"""Request bodies: compressed or not, limited by their decompressed size, in constant memory."""

import gzip
import tracemalloc
import zlib
from typing import Any

import pytest
import zstandard
from tarn.api.http.bodies.body_middleware import DECODERS, Decoder
from tarn.errors import InvalidFormat

from tests.in_process_api import InProcessApi

JSON = {"Content-Type": "application/json"}


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


@pytest.mark.parametrize(("encoding", "compress"), [("gzip", gzip.compress), ("zstd", zstd), ("GZIP", gzip.compress)])
def test_compressed_body_is_decompressed(api: InProcessApi, encoding: str, compress):
    body = compress(b'{"name": "donations"}')

    response = api.admin("POST", "/v1/datasets", content=body, headers=JSON | {"Content-Encoding": encoding})

    assert response.status_code == 201


@pytest.mark.parametrize(("encoding", "compress"), [("gzip", gzip.compress), ("zstd", zstd)])
def test_decompression_bomb_is_cut_off_and_memory_stays_constant(api: InProcessApi, encoding: str, compress):
    bomb = compress(b" " * (256 << 20))
    api.anonymous.get("/healthz")

    tracemalloc.start()
    response = api.admin("POST", "/v1/datasets", content=bomb, headers=JSON | {"Content-Encoding": encoding})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert response.status_code == 413
    assert response.json()["limit"] == 1 << 20
    assert response.headers["Connection"] == "close"
    assert peak < 48 << 20


def test_plain_body_over_the_limit_is_refused_by_its_declared_length(api: InProcessApi):
    response = api.admin("POST", "/v1/datasets", content=b" " * (2 << 20), headers=JSON)

    assert response.status_code == 413


def test_plain_body_over_the_limit_is_refused_while_it_streams(api: InProcessApi):
    response = api.admin("POST", "/v1/datasets", content=(b" " * 65536 for _ in range(32)), headers=JSON)

    assert response.status_code == 413


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", b""),
        ("gzip", b"not gzip"),
        ("gzip", gzip.compress(b'{"name": "donations"}', mtime=0)[:-4]),
        ("gzip", gzip.compress(b'{"name": "donations"}', mtime=0) + b"trailing"),
        ("gzip", zlib.compress(b'{"name": "donations"}')),
        ("zstd", b"not zstd"),
        ("zstd", zstd(b'{"name": "donations"}')[:-3]),
    ],
    # Explicit ids: gzip writes the time into its header, and the workers of one run must agree on test names.
    ids=["empty-gzip", "no-gzip", "cut-gzip", "trailing-gzip", "zlib", "no-zstd", "cut-zstd"],
)
def test_broken_compression_is_refused(api: InProcessApi, encoding: str, body: bytes):
    response = api.admin("POST", "/v1/datasets", content=body, headers=JSON | {"Content-Encoding": encoding})

    assert (response.status_code, response.json()["type"]) == (400, "/problems/invalid-format")
    assert encoding in response.json()["detail"]


@pytest.mark.parametrize("encoding", ["br", "gzip, gzip", "deflate"])
def test_unknown_encoding_is_refused(api: InProcessApi, encoding: str):
    response = api.admin("POST", "/v1/datasets", content=b"x", headers=JSON | {"Content-Encoding": encoding})

    assert response.status_code == 415
    assert "zstd" in response.json()["supported"]


def test_zstd_frame_with_a_huge_window_is_refused():
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=27, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    frame = compressor.compress(b"x" * 1000) + compressor.flush()

    with pytest.raises(InvalidFormat):
        list(Decoder("zstd", DECODERS["zstd"]).feed(frame))


@pytest.mark.parametrize(("name", "compress"), [("gzip", gzip.compress), ("zstd", zstd)])
def test_concatenated_members_are_one_stream(name: str, compress):
    decoder = Decoder(name, DECODERS[name])
    stream = compress(b"one ") + compress(b"two ") + compress(b"three" * 10_000)

    decoded = b"".join(piece for start in range(0, len(stream), 7) for piece in decoder.feed(stream[start : start + 7]))
    decoder.finish()

    assert decoded == b"one two " + b"three" * 10_000


@pytest.mark.parametrize(("name", "compress"), [("gzip", gzip.compress), ("zstd", zstd)])
@pytest.mark.parametrize("content", [b"", b"x"])
def test_stream_of_many_nearly_empty_members_is_refused(name: str, compress, content: bytes):
    decoder = Decoder(name, DECODERS[name])

    with pytest.raises(InvalidFormat, match="too many members"):
        list(decoder.feed(compress(content) * 10_000))


@pytest.mark.parametrize(("name", "compress"), [("gzip", gzip.compress), ("zstd", zstd)])
def test_thousands_of_members_of_a_sensible_size_are_one_stream(name: str, compress):
    decoder = Decoder(name, DECODERS[name])
    block = b"statement " * 6_528

    decoded = sum(len(piece) for piece in decoder.feed(compress(block) * 3_000))
    decoder.finish()

    assert decoded == len(block) * 3_000


def test_members_of_a_zstd_stream_share_one_decompressor(monkeypatch: pytest.MonkeyPatch):
    created, create = [], zstandard.ZstdDecompressor

    def counted(**options: Any) -> zstandard.ZstdDecompressor:
        created.append(create(**options))
        return created[-1]

    monkeypatch.setattr(zstandard, "ZstdDecompressor", counted)
    decoder = Decoder("zstd", DECODERS["zstd"])

    list(decoder.feed(zstd(b"x" * 64) * 20_000))

    assert len(created) == 1


def test_compressed_bytes_count_against_the_limit(api: InProcessApi):
    # The name of a gzip member has no length limit, and decompresses to nothing.
    endless = b"\x1f\x8b\x08\x08" + b"\0" * 4 + b"\0\xff" + b"n" * (2 << 20)
    pieces = (endless[start : start + 65536] for start in range(0, len(endless), 65536))

    response = api.admin("POST", "/v1/datasets", content=pieces, headers=JSON | {"Content-Encoding": "gzip"})

    assert response.status_code == 413
