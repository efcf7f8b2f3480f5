"""A real S3 server on the loopback interface that records its requests: versitygw where it was built, otherwise
moto's.
"""

import logging
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import botocore.session
import pytest
from tarn.model.ids import new_id
from tarn.settings import Settings, load_settings
from tarn.storage.connection import Connection
from werkzeug.serving import make_server

VERSITYGW = Path(__file__).parent.parent / ".tools" / "bin" / "versitygw"
ACCESS_KEY, SECRET_KEY = "tarn-test-key", "tarn-test-secret"
BUCKET = "lake"

LOGGED = re.compile(r" s3_\w+ .* (/\S*) (\d{3}) ")
"""A line of versitygw's log, which has the operation but not the method."""
OPERATION = re.compile(r" s3_(\w+) ")
METHODS = {"GetObject": "GET", "HeadObject": "HEAD", "PutObject": "PUT", "ListObjectsV2": "LIST"}


class Request(NamedTuple):
    """One HTTP request, independent of the client library."""

    operation: str
    """GET, HEAD, PUT or LIST; rarer operations have the server's name for them."""
    key: str
    """Key of the object; for a LIST, the prefix."""
    status: int


@dataclass(frozen=True)
class S3Server:
    """A running server: its address, the requests so far, and functions to stop or pause it."""

    endpoint: str
    strict: bool = True
    """Whether the server checks signatures and resolves races; moto's server does neither."""
    stop: Callable[[], None] = field(repr=False, default=lambda: None)
    signal: Callable[[int], None] | None = field(repr=False, default=None)
    """Send a signal to the server's process, if it has a process of its own."""
    requests: Callable[[], list[Request]] = field(repr=False, default=list)

    @contextmanager
    def counted(self) -> Iterator[list[Request]]:
        """Yield a list that is filled at the end of the block with all requests answered during it."""
        before = len(self.requests())
        requests: list[Request] = []
        yield requests
        requests += self.requests()[before:]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend the server: it accepts connections and does not respond."""
        assert self.signal is not None
        self.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)

    @property
    def options(self) -> dict[str, str]:
        return {
            "aws_endpoint": self.endpoint,
            "aws_access_key_id": ACCESS_KEY,
            "aws_secret_access_key": SECRET_KEY,
        }

    def client(self) -> Any:
        """Return Amazon's own client, for operations that Tarn does not have."""
        return botocore.session.get_session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
        )

    def settings(self, **overrides: Any) -> Settings:
        """Return settings for a new lake on this server."""
        values: dict[str, Any] = {"lake_uri": f"s3://{BUCKET}/{new_id()}", "storage_options": self.options}
        return load_settings(**(values | overrides))

    def connection(self) -> Connection:
        return Connection.from_settings(self.settings())


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Start one server for all tests of this test process that do not stop it."""
    with s3_server(tmp_path_factory.mktemp("s3") / "data") as server:
        yield server


@pytest.fixture
def strict_s3(s3: S3Server) -> S3Server:
    if not s3.strict:
        pytest.skip("versitygw is not built here, and moto's server checks no signatures and resolves no races")
    return s3


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """Start the best available S3 server with one empty bucket and its data in `folder`."""
    with versitygw(folder) if VERSITYGW.exists() else moto_server() as server:
        yield server


@contextmanager
def versitygw(folder: Path) -> Iterator[S3Server]:
    (folder / BUCKET).mkdir(parents=True)
    log = folder.with_name(f"{folder.name}.log")
    port = free_port()
    process = subprocess.Popen(
        [VERSITYGW, "--quiet", "--access-log", log, "--port", f"127.0.0.1:{port}", "posix", folder],
        env={"PATH": os.defpath, "ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def stop() -> None:
        process.kill()
        process.wait()

    try:
        _await_listener(port, process)
        yield S3Server(
            f"http://127.0.0.1:{port}",
            stop=stop,
            signal=process.send_signal,
            # A line is written before the response is sent.
            requests=lambda: [*map(_logged, log.read_text().splitlines()[1:])],
        )
    finally:
        stop()


@contextmanager
def moto_server(wrap: Callable[[Any], Any] = lambda app: app) -> Iterator[S3Server]:
    """Start moto's server, which checks no signatures and issues keys for roles; `wrap` wraps its WSGI application."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    recorded: list[Request] = []
    application = _recording(wrap(DomainDispatcherApplication(create_backend_app)), recorded)
    server = make_server("127.0.0.1", 0, application, threaded=True)
    thread = threading.Thread(target=server.serve_forever, args=[0.01], daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        thread.join()
        server.server_close()

    endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        S3Server(endpoint).client().create_bucket(Bucket=BUCKET)
        yield S3Server(endpoint, strict=False, stop=stop, requests=lambda: [*recorded])
    finally:
        stop()


def _logged(line: str) -> Request:
    request, operation = LOGGED.search(line), OPERATION.search(line)
    assert request is not None, line
    assert operation is not None, line
    return _request(METHODS.get(operation[1], operation[1]), request[1], int(request[2]))


def _recording(application: Any, recorded: list[Request]) -> Any:
    """Wrap a WSGI application so that each request is recorded when its response begins."""

    def respond(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        def start(status: str, *more: Any) -> Any:
            url = f"{environ['PATH_INFO']}?{environ['QUERY_STRING']}"
            method = environ["REQUEST_METHOD"]
            method = "LIST" if method == "GET" and "list-type=" in url else method
            recorded.append(_request(method, url, int(status.split()[0])))
            return start_response(status, *more)

        return application(environ, start)

    return respond


def _request(operation: str, url: str, status: int) -> Request:
    parts = urlsplit(url)
    prefix = parse_qs(parts.query).get("prefix", [""])[0]
    return Request(
        operation, prefix if operation == "LIST" else unquote(parts.path).removeprefix(f"/{BUCKET}/"), status
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await_listener(port: int, process: "subprocess.Popen[bytes]") -> None:
    deadline = monotonic() + 20
    while monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            try:
                raise RuntimeError(f"the S3 server exited with {process.wait(timeout=0.01)}")
            except subprocess.TimeoutExpired:
                continue
    raise TimeoutError("the S3 server does not accept connections")
