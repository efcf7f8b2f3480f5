"""A real S3 server on the loopback: versitygw where it was built, moto's where it was not."""

import logging
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import botocore.session
from werkzeug.serving import make_server

from app.model.ids import new_id
from app.settings import Settings
from app.storage.connection import Connection

VERSITYGW = Path(__file__).parent.parent / ".tools" / "bin" / "versitygw"
ACCESS_KEY, SECRET_KEY = "tarn-test-key", "tarn-test-secret"
BUCKET = "lake"


@dataclass(frozen=True)
class S3Server:
    """Where it listens, and how to end it before its time."""

    endpoint: str
    strict: bool = True
    """Whether it checks signatures and decides races; moto's server does neither."""
    stop: Callable[[], None] = field(repr=False, default=lambda: None)

    @property
    def options(self) -> dict[str, str]:
        return {
            "aws_endpoint": self.endpoint,
            "aws_access_key_id": ACCESS_KEY,
            "aws_secret_access_key": SECRET_KEY,
        }

    def client(self) -> Any:
        """Amazon's own client, for what Tarn has no word for."""
        return botocore.session.get_session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
        )

    def settings(self, **overrides: Any) -> Settings:
        """Settings for a lake of its own on this server."""
        given: dict[str, Any] = {"lake_uri": f"s3://{BUCKET}/{new_id()}", "storage_options": self.options}
        return Settings(**(given | overrides))

    def connection(self) -> Connection:
        return Connection.from_settings(self.settings())


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """The best S3 server there is here, with one empty bucket, its data in `folder`."""
    with versitygw(folder) if VERSITYGW.exists() else moto_server() as server:
        yield server


@contextmanager
def versitygw(folder: Path) -> Iterator[S3Server]:
    (folder / BUCKET).mkdir(parents=True)
    port = free_port()
    process = subprocess.Popen(
        [VERSITYGW, "--quiet", "--port", f"127.0.0.1:{port}", "posix", folder],
        env={"PATH": os.defpath, "ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def stop() -> None:
        process.kill()
        process.wait()

    try:
        _await_listener(port, process)
        yield S3Server(f"http://127.0.0.1:{port}", stop=stop)
    finally:
        stop()


@contextmanager
def moto_server(wrap: Callable[[Any], Any] = lambda app: app) -> Iterator[S3Server]:
    """moto's server, which checks no signature and issues keys for roles; `wrap` goes around its WSGI application."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server("127.0.0.1", 0, wrap(DomainDispatcherApplication(create_backend_app)), threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        thread.join()
        server.server_close()

    endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        S3Server(endpoint).client().create_bucket(Bucket=BUCKET)
        yield S3Server(endpoint, strict=False, stop=stop)
    finally:
        stop()


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
                raise RuntimeError(f"the S3 server ended with {process.wait(timeout=0.01)}")
            except subprocess.TimeoutExpired:
                continue
    raise TimeoutError("the S3 server does not listen")
