"""Fetching from the web: real connections on the loopback to servers that misbehave."""

import gzip
import itertools
import pickle
import ssl
import threading
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given, settings
from hypothesis import strategies as st
from tarn.archive.fetching.addresses import resolve_by_system
from tarn.archive.fetching.dns import AT_ONCE, Lookups
from tarn.archive.fetching.fetch import Fetcher
from tarn.archive.fetching.sources import Source
from tarn.archive.fetching.urls import Url
from tarn.archive.fetching.web import REDIRECTS, file_name
from tarn.errors import BodyTooLarge, FileNotFound, SchemaViolation, SourceFailed, TarnError

from tests.archive.conftest import FetcherOf
from tests.archive.web import Canary, Scripted, answer, listening, redirect, scripted

NO_DEADLINE = settings(deadline=None)
MIB = 1 << 20
BOMB = gzip.compress(bytes(64 * MIB))


def address(server: Scripted, path: str = "/", host: str = "files.test") -> str:
    return f"http://{host}:{server.port}{path}"


def read(source: Source) -> bytes:
    with source:
        return b"".join(source)


def refusal(fetcher: Fetcher, uri: str) -> str:
    with pytest.raises(SchemaViolation) as caught:
        fetcher.open(uri)
    return str(caught.value.members["errors"][0].reason)


def test_file_is_fetched_with_its_metadata(fetcher: Fetcher, server: Scripted):
    server.scripts["/a/f%C3%BCr.pdf?token=secret"] = answer(b"%PDF", Content_Type="Application/PDF; x=y")

    source = fetcher.open(address(server, "/a/für.pdf?token=secret#part"))

    assert (source.name, source.size, source.media_type) == ("für.pdf", 4, "application/pdf")
    assert source.uri == address(server, "/a/f%C3%BCr.pdf"), "a query may hold a signature"
    assert read(source) == b"%PDF"


def test_large_file_is_read_in_small_chunks(fetcher: Fetcher, server: Scripted):
    body = bytes(range(256)) * 4096 * 8
    server.scripts["/large"] = answer(body)

    with fetcher.open(address(server, "/large")) as source:
        pieces = [*source]
    assert b"".join(pieces) == body
    assert max(map(len, pieces)) <= MIB


def test_file_without_a_content_length_is_complete(fetcher: Fetcher, server: Scripted):
    server.scripts["/chunked"] = lambda: [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"]
    server.scripts["/until-closed"] = lambda: [b"HTTP/1.0 200 OK\r\n\r\nabc"]

    for path in ("/chunked", "/until-closed"):
        source = fetcher.open(address(server, path))
        assert (source.size, source.media_type, read(source)) == (None, None, b"abc")


@pytest.mark.parametrize(
    ("disposition", "name"),
    [
        ('attachment; filename="report 1.pdf"', "report 1.pdf"),
        ("attachment; filename*=UTF-8''%C3%BC.pdf; filename=u.pdf", "ü.pdf"),
        ("attachment; filename=u.pdf; filename*=UTF-8''%C3%BC.pdf", "ü.pdf"),
        ("attachment", "data"),
        ('attachment; filename="../../etc/passwd"', None),
        ('attachment; filename="a\\\\b"', None),
        ('attachment; filename=".."', None),
        ("attachment; filename*=UTF-8''a%00b", None),
        ("attachment; filename*=iso-8859-1''%FC.pdf", "ü.pdf"),
        ("attachment; filename*=unicode_escape''%5Cudc80", "data"),
        ('attachment; filename=""', "data"),
    ],
)
def test_name_of_the_server_is_used_if_it_is_valid(
    fetcher: Fetcher, server: Scripted, disposition: str, name: str | None
):
    server.scripts["/data"] = answer(b"1", Content_Disposition=disposition)

    with fetcher.open(address(server, "/data")) as source:
        assert source.name == name


@NO_DEADLINE
@given(st.binary(max_size=80) | st.from_regex(rb"\A(; ?filename(\*[0-9]?\*?)?=[a-z0-9%';\"-]{0,20}){1,3}\Z"))
def test_any_content_disposition_header_yields_a_name(disposition: bytes):
    name = file_name(b"attachment" + disposition)

    assert name is None or name.encode() is not None


def test_request_accepts_uncompressed_bytes_only_and_reveals_nothing(fetcher: Fetcher, server: Scripted):
    server.scripts["/x"] = answer(b"1")

    read(fetcher.open(address(server, "/x")))

    assert server.requests == [
        f"GET /x HTTP/1.1\r\nHost: files.test:{server.port}\r\nUser-Agent: tarn\r\nAccept: */*\r\n"
        "Accept-Encoding: identity\r\nConnection: close\r\n\r\n"
    ]


def test_proxies_and_credentials_of_the_environment_are_ignored(
    fetcher: Fetcher, server: Scripted, canary: Canary, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    (tmp_path / "netrc").write_text("machine files.test login me password hunter2\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{canary.port}")
    server.scripts["/x"] = answer(b"1", Set_Cookie="a=b")

    assert read(fetcher.open(address(server, "/x"))) == b"1"
    assert read(fetcher.open(address(server, "/x"))) == b"1"
    assert "hunter2" not in server.requests[0]
    assert "Authorization" not in server.requests[0]
    assert "Cookie" not in server.requests[1]


def test_pickled_fetcher_has_the_same_configuration(fetcher_of: FetcherOf, server: Scripted):
    server.scripts["/x"] = answer(b"1")
    fetcher = fetcher_of()
    assert fetcher.web._tls is not None

    assert read(pickle.loads(pickle.dumps(fetcher)).open(address(server, "/x"))) == b"1"


# URIs that are refused


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("gopher://files.test/", "only http"), ("ftp://files.test/", "only http"), ("data:text/plain,x", "only http"),
        ("jar:http://files.test/!/x", "only http"), ("javascript:1", "only http"),
        ("dict://files.test:1/", "only http"),
        ("ldap://files.test/", "only http"), ("unix:/run/x.sock", "only http"), ("ws://files.test/", "only http"),
        ("tftp://files.test/x", "only http"), ("netdoc:///etc/passwd", "only http"), ("php://filter", "only http"),
        ("view-source:http://files.test", "only http"), ("urn:x:y", "only http"), ("localhost:80", "only http"),
        ("http://me@files.test/", "credentials"), ("http://me:pw@files.test/", "credentials"),
        ("http://@files.test/", "credentials"), ("http://files.test@canary.test/", "credentials"),
        ("http://files.test:80@canary.test/", "credentials"), ("http://me%40x@files.test/", "credentials"),
        ("http://files.test\\@canary.test/", "backslash"), ("http:\\\\canary.test\\", "backslash"),
        ("http://files.test/\r\nX: y", "control"), ("http://files.test/\x00", "control"),
        ("http://fi\tles.test/", "control"),
        ("http://files.test/a b", "space"), (" http://files.test/", "absolute"), ("http://files.test /", "space"),
        ("http://files.test/\u2028", "control"), ("http://files.test:0/", "port 0"),
        ("http://files.test:65536/", "formed"),
        ("http://files.test:-1/", "formed"), ("http://files.test:8x/", "formed"),
        ("http://files.test:\u0661/", "formed"),
        ("http:///x", "no host"), ("http://", "no host"), ("http:/x", "no host"), ("http:x", "no host"),
        ("http://:80/", "no host"), ("http://?x", "no host"), ("http://#x", "no host"), ("http://[::1/", "formed"),
        ("http://files.test/\udc80", "formed"), ("http://fi\u2100les.test/", "formed"),
        ("http://a,b/", "no valid name"),
        ("http://files.test/" + "a" * 8192, "longer"), ("", "absolute"), ("files.test/x", "absolute"),
        ("//files.test/x", "absolute"), ("./x", "absolute"),
    ],
)  # fmt: skip
def test_uri_that_is_not_plain_is_refused(fetcher: Fetcher, uri: str, reason: str):
    assert reason in refusal(fetcher, uri)


@NO_DEADLINE
@given(st.text(max_size=60).map(lambda text: f"http://{text}") | st.from_regex(r"\Ahttps?://[!-~]{1,40}\Z"))
def test_url_is_refused_or_parsed_unambiguously(written: str):
    try:
        url = Url.parse(written)
    except SchemaViolation:
        return
    assert f"{url.origin}{url.target}".isascii()
    assert Url.parse(f"{url.origin}{url.target}") == url


# Redirects


@pytest.mark.parametrize("status", ["301 A", "302 B", "303 C", "307 D", "308 E"])
def test_redirect_is_followed_and_the_final_url_is_returned(fetcher: Fetcher, server: Scripted, status: str):
    server.scripts |= {"/a/b": redirect("../c?d=e", status), "/c?d=e": answer(b"here")}

    source = fetcher.open(address(server, "/a/b"))

    assert (source.uri, source.name, read(source)) == (address(server, "/c"), "c", b"here")


@pytest.mark.parametrize(
    "location",
    [
        "http://canary.test:{port}/", "http://127.0.0.1:{port}/", "//127.0.0.1:{port}/", "http://localhost:{port}/",
        "http://[::1]:{port}/", "http://[::ffff:127.0.0.1]:{port}/", "http://2130706433:{port}/", "http://127.1:{port}/",
        "http://0x7f000001:{port}/", "http://0:{port}/", "http://169.254.169.254/latest/meta-data/",
        "http://[fe80::1%25lo]:{port}/", "http://files.test:{port}@canary.test:{port}/", "http://me:pw@files.test:{port}/",
        "https://canary.test:{port}/", "ftp://canary.test:{port}/", "gopher://canary.test:{port}/_x", "file:///etc/passwd",
        "s3://bucket/key", "data:text/plain,x", "http://files.test:0/", "\\\\canary.test\\x", "http:\\\\canary.test",
        "/\\canary.test", "http://files.test:{port}\t/",
    ],
)  # fmt: skip
def test_redirect_to_a_forbidden_address_is_refused_and_not_followed(
    fetcher_of: FetcherOf, server: Scripted, canary: Canary, location: str
):
    names = {"files.test": ["127.0.0.1"], "canary.test": ["127.0.0.1"], "localhost": ["127.0.0.1", "::1"]}
    server.scripts["/x"] = redirect(location.format(port=canary.port))

    assert refusal(fetcher_of(resolve=lambda host, _: names[host]), address(server, "/x"))
    assert len(server.requests) == 1
    assert not canary.touched()


def test_number_of_redirects_is_limited(fetcher: Fetcher, server: Scripted):
    server.scripts |= {f"/{n}": redirect(f"/{n + 1}") for n in range(REDIRECTS)} | {f"/{REDIRECTS}": answer(b"end")}
    server.scripts["/loop"] = redirect("/loop")

    assert read(fetcher.open(address(server, "/0"))) == b"end"
    assert "more than 5 times" in refusal(fetcher, address(server, "/loop"))
    assert len(server.requests) == 2 * (REDIRECTS + 1)


def test_redirect_without_a_location_is_refused(fetcher: Fetcher, server: Scripted):
    server.scripts |= {"/a": answer(status="302 Found"), "/b": lambda: [b"HTTP/1.1 302 F\r\nLocation: /\xff\r\n\r\n"]}

    assert "without a valid Location header" in refusal(fetcher, address(server, "/a"))
    assert "without a valid Location header" in refusal(fetcher, address(server, "/b"))


# DNS rebinding


def test_name_is_resolved_once_and_the_checked_address_is_connected_to(fetcher_of: FetcherOf):
    answers = iter([["127.0.0.2"], ["127.0.0.1"]])
    with scripted("127.0.0.2") as server, listening("127.0.0.1", server.port) as listener:
        canary = Canary((listener,))
        server.scripts["/x"] = answer(b"1")
        fetcher = fetcher_of(resolve=lambda *_: next(answers), fetch_private_hosts=("127.0.0.2",))

        assert read(fetcher.open(address(server, "/x", "rebind.test"))) == b"1"
        assert [*answers] == [["127.0.0.1"]]
        assert not canary.touched()


def test_name_is_checked_again_after_a_redirect_to_itself(fetcher_of: FetcherOf):
    answers = iter([["127.0.0.2"], ["127.0.0.1"]])
    with scripted("127.0.0.2") as server, listening("127.0.0.1", server.port) as listener:
        canary = Canary((listener,))
        server.scripts["/x"] = redirect("/y")
        fetcher = fetcher_of(resolve=lambda *_: next(answers), fetch_private_hosts=("127.0.0.2",))

        assert "not at a public address" in refusal(fetcher, address(server, "/x", "rebind.test"))
        assert len(server.requests) == 1
        assert not canary.touched()


def test_next_address_is_tried_if_the_first_refuses_the_connection(fetcher_of: FetcherOf):
    with scripted("127.0.0.2") as server:
        server.scripts["/x"] = answer(b"1")
        fetcher = fetcher_of(resolve=lambda *_: ["127.0.0.3", "127.0.0.2"])

        assert read(fetcher.open(address(server, "/x"))) == b"1"


def test_refused_connection_is_a_source_failure(fetcher: Fetcher):
    with listening() as listener:
        port = listener.getsockname()[1]
    with pytest.raises(SourceFailed, match="cannot connect to"):
        fetcher.open(f"http://files.test:{port}/")


# TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Create a certificate authority, and a certificate for files.test."""
    folder = tmp_path_factory.mktemp("certificates")
    issuer_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "authority")])

    def signed(name: x509.Name, public: ec.EllipticCurvePublicKey, *extensions: x509.ExtensionType) -> bytes:
        builder = x509.CertificateBuilder(issuer, name, public, x509.random_serial_number())
        builder = builder.not_valid_before(datetime.now(UTC) - timedelta(days=1))
        builder = builder.not_valid_after(datetime.now(UTC) + timedelta(days=1))
        for extension in extensions:
            builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        return builder.sign(issuer_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    identifier = x509.SubjectKeyIdentifier.from_public_key(issuer_key.public_key())
    constraints = x509.BasicConstraints(ca=True, path_length=None)
    (folder / "authority.pem").write_bytes(signed(issuer, issuer_key.public_key(), constraints, identifier))
    names = x509.SubjectAlternativeName([x509.DNSName("files.test")])
    leaf = signed(x509.Name([]), key.public_key(), names)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "server.pem").write_bytes(leaf + private)
    return folder / "authority.pem", folder / "server.pem"


@pytest.fixture
def requested_names() -> list[str | None]:
    """Return the names that clients of the TLS server requested."""
    return []


@pytest.fixture
def secure(certificates: tuple[Path, Path], requested_names: list[str | None]) -> Iterator[Scripted]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates[1])
    context.sni_callback = lambda _, name, __: requested_names.append(name)
    with scripted(tls=context) as server:
        server.scripts["/x"] = answer(b"sealed")
        yield server


@pytest.fixture
def trusting(monkeypatch: pytest.MonkeyPatch, certificates: tuple[Path, Path], fetcher_of: FetcherOf) -> Fetcher:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates[0]))
    return fetcher_of(fetch_private_hosts=("files.test", "other.test", "127.0.0.1"), resolve=lambda *_: ["127.0.0.1"])


def test_certificate_is_verified_for_the_name_though_the_address_is_pinned(
    trusting: Fetcher, secure: Scripted, requested_names: list[str | None]
):
    assert read(trusting.open(f"https://files.test:{secure.port}/x")) == b"sealed"
    assert requested_names == ["files.test"]


@pytest.mark.parametrize("host", ["other.test", "127.0.0.1"])
def test_certificate_of_another_name_is_refused_before_a_request_is_sent(
    trusting: Fetcher, secure: Scripted, host: str
):
    assert "no valid certificate" in refusal(trusting, f"https://{host}:{secure.port}/x")
    assert secure.requests == []


def test_certificate_of_an_unknown_authority_is_refused(fetcher: Fetcher, secure: Scripted):
    assert "no valid certificate" in refusal(fetcher, f"https://files.test:{secure.port}/x")
    assert secure.requests == []


def test_server_that_never_completes_the_handshake_times_out(fetcher_of: FetcherOf):
    with listening() as listener, pytest.raises(SourceFailed, match="did not respond in time"):
        fetcher_of(fetch_timeout=0.05).open(f"https://files.test:{listener.getsockname()[1]}/x")


def test_redirect_from_https_to_http_is_refused(trusting: Fetcher, secure: Scripted, server: Scripted):
    secure.scripts["/down"] = redirect(address(server, "/x"))

    assert "from https to http" in refusal(trusting, f"https://files.test:{secure.port}/down")
    assert server.requests == []


# Servers that misbehave


@pytest.mark.parametrize(
    ("status", "error"),
    [
        ("404 Not Found", FileNotFound), ("410 Gone", FileNotFound), ("401 Unauthorized", SchemaViolation),
        ("403 Forbidden", SchemaViolation), ("204 No Content", SchemaViolation),
        ("206 Partial Content", SchemaViolation),
        ("300 Choices", SchemaViolation), ("304 Not Modified", SchemaViolation), ("408 Timeout", SourceFailed),
        ("429 Too Many", SourceFailed), ("500 Internal", SourceFailed), ("503 Unavailable", SourceFailed),
    ],
)  # fmt: skip
def test_error_status_is_an_error(fetcher: Fetcher, server: Scripted, status: str, error: type[TarnError]):
    server.scripts["/x?token=secret"] = answer(status=status)

    with pytest.raises(error, match=f"responded with status {status[:3]}") as caught:
        fetcher.open(address(server, "/x?token=secret"))
    assert "secret" not in caught.value.detail


@pytest.mark.parametrize(
    "pieces",
    [
        [b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n", b"12345"],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"5\r\n12345\r\n"],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"5\r\n123"],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"nonsense"],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 9\r\n\r\n", b"3\r\nabc\r\n0\r\n\r\n"],
    ],
)
def test_truncated_file_is_a_failure(fetcher: Fetcher, server: Scripted, pieces: list[bytes]):
    server.scripts["/x"] = lambda: pieces

    source = fetcher.open(address(server, "/x"))
    with pytest.raises(SourceFailed):
        read(source)


@pytest.mark.parametrize(
    "response",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0x10\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 100_000 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 1_000_000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nabc",
        b"\x00" * 200_000,
    ],
)
def test_response_that_is_not_http_is_a_failure(fetcher: Fetcher, server: Scripted, response: bytes):
    server.scripts["/x"] = lambda: [response]

    with pytest.raises(SourceFailed, match=r"closed the connection|sent an invalid or incomplete HTTP response"):
        fetcher.open(address(server, "/x"))


def test_file_with_too_large_content_length_is_refused_without_reading_it(fetcher_of: FetcherOf, server: Scripted):
    server.scripts["/x"] = lambda: [b"HTTP/1.1 200 OK\r\nContent-Length: 1001\r\n\r\n"]

    with pytest.raises(BodyTooLarge) as caught:
        fetcher_of(fetch_max_bytes=1000).open(address(server, "/x"))
    assert caught.value.members == {"limit": 1000}


def test_endless_file_is_refused_at_the_limit(fetcher_of: FetcherOf, server: Scripted):
    server.scripts["/x"] = lambda: itertools.chain([b"HTTP/1.1 200 OK\r\n\r\n"], itertools.repeat(b"0" * 65536))

    received = 0
    with fetcher_of(fetch_max_bytes=MIB).open(address(server, "/x")) as source, pytest.raises(BodyTooLarge):
        for chunk in source:
            received += len(chunk)
    assert received <= MIB


def test_file_of_exactly_the_limit_is_accepted(fetcher_of: FetcherOf, server: Scripted):
    server.scripts["/x"] = answer(b"0" * 1000)

    assert len(read(fetcher_of(fetch_max_bytes=1000).open(address(server, "/x")))) == 1000


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "deflate", "br", "zstd", "identity, gzip", "x-unknown"])
def test_body_in_an_encoding_that_was_not_requested_is_refused_without_decompressing_it(
    fetcher: Fetcher, server: Scripted, encoding: str
):
    server.scripts["/bomb"] = answer(BOMB, Content_Encoding=encoding)

    assert "encoding that was not requested" in refusal(fetcher, address(server, "/bomb"))


def test_compressed_file_is_unchanged(fetcher: Fetcher, server: Scripted):
    body = gzip.compress(bytes(MIB))
    server.scripts["/data.gz"] = answer(body, Content_Type="application/gzip", Content_Encoding="identity")

    assert read(fetcher.open(address(server, "/data.gz"))) == body


def test_server_that_sends_nothing_times_out(fetcher_of: FetcherOf, server: Scripted):
    def block() -> Iterable[bytes]:
        server.over.wait()
        return []

    server.scripts["/x"] = block
    with pytest.raises(SourceFailed, match="did not respond in time"):
        fetcher_of(fetch_timeout=0.05).open(address(server, "/x"))
    server.over.set()


def test_server_that_stops_midway_times_out(fetcher_of: FetcherOf, server: Scripted):
    def halting() -> Iterable[bytes]:
        yield b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n12345"
        server.over.wait()

    server.scripts["/x"] = halting
    source = fetcher_of(fetch_timeout=0.05).open(address(server, "/x"))
    with pytest.raises(SourceFailed, match="did not respond in time"):
        read(source)
    server.over.set()


@pytest.mark.parametrize("beginning", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"])
def test_server_that_sends_slowly_without_end_times_out(fetcher_of: FetcherOf, server: Scripted, beginning: bytes):
    """Advance the clock by a second at each reading, so that the fetch has a few dozen reads however fast they are."""
    server.scripts["/x"] = lambda: itertools.chain([beginning], itertools.repeat(beginning))
    fetcher = fetcher_of(clock=itertools.count().__next__, fetch_max_seconds=12)

    with pytest.raises(SourceFailed, match="did not respond in time"):
        read(fetcher.open(address(server, "/x")))


def test_name_server_that_never_responds_times_out_and_occupies_a_bounded_number_of_threads(fetcher_of: FetcherOf):
    released = threading.Event()
    resolved: list[str] = []

    def hanging(host: str, port: int) -> list[str]:
        resolved.append(host)
        released.wait()
        return ["127.0.0.1"]

    fetcher = fetcher_of(resolve=hanging, fetch_timeout=0.01)
    for number in range(AT_ONCE + 8):
        with pytest.raises(SourceFailed, match="takes too long to be resolved"):
            fetcher.open(f"http://{number}.test/x")

    assert len(resolved) == AT_ONCE
    assert sum(thread.name == "lookup" for thread in threading.enumerate()) == AT_ONCE
    released.set()


def test_names_are_resolved_again_when_the_name_server_recovers(fetcher_of: FetcherOf):
    released = threading.Event()

    def hanging(host: str, port: int) -> list[str]:
        released.wait()
        return ["127.0.0.1"]

    fetcher = fetcher_of(resolve=hanging, fetch_timeout=0.01)
    for _ in range(AT_ONCE + 1):
        with pytest.raises(SourceFailed):
            fetcher.open("http://files.test/x")
    released.set()
    for thread in threading.enumerate():
        if thread.name == "lookup":
            thread.join()

    resolve = pickle.loads(pickle.dumps(Lookups(resolve_by_system, 20)))
    assert resolve("127.0.0.1", 80) == ["127.0.0.1"]
    assert fetcher.web.guard.resolve("files.test", 80) == ["127.0.0.1"]
