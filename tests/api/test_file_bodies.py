"""File bodies sent to a server process over a socket: how much is read, and how much is written to disk."""

import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.server import Server
from tests.waiting import wait_until

QUOTA = 3 << 20
CHUNK = bytes(64 << 10)
IN_FLIGHT = 24 << 20
"""Bytes that may be in transit when a body is refused: blocks between two threads, and the buffers of two sockets."""


class Tenant:
    """A tenant with a quota of bytes, and a dataset."""

    def __init__(self, server: Server, name: str) -> None:
        self._server, self._admin, self.name = server, server.client(), name
        assert self._admin.post("/v1/admin/tenants", json={"name": name}).status_code == 201
        assert self._admin.post("/v1/datasets", json={"name": name}).status_code == 201
        grant = {"dataset": name, "level": "write"}
        assert self._admin.post(f"/v1/admin/tenants/{name}/grants", json=grant).status_code == 201
        self.key = self._admin.post(f"/v1/admin/tenants/{name}/keys", json={}).json()["key"]
        limits = self._admin.put(f"/v1/admin/tenants/{name}/limits", json={"quota_bytes": QUOTA})
        assert limits.status_code == 200
        self.client = server.client(self.key)
        self.files = f"/v1/datasets/{name}/files"

    @property
    def used(self) -> int:
        return int(self._admin.get(f"/v1/admin/tenants/{self.name}/limits").json()["used_bytes"])

    @property
    def stored(self) -> list[Path]:
        """Return all bytes in the archive and in uploads, finished or not."""
        lake = self._server.folder / "data" / "lake" / self.name
        return [path for name in ("archive", "uploads") for path in (lake / name).rglob("*") if path.is_file()]

    @contextmanager
    def sending(self, method: str, path: str, *headers: str) -> Iterator[socket.socket]:
        """Open a request without sending its body."""
        at = urlsplit(self._server.url)
        assert at.hostname is not None
        with socket.create_connection((at.hostname, at.port or 80), timeout=60) as connection:
            lines = [f"{method} {path} HTTP/1.1", f"Host: {at.netloc}", f"Authorization: Bearer {self.key}", *headers]
            connection.sendall("\r\n".join([*lines, "", ""]).encode())
            yield connection


@pytest.fixture
def tenant(server: Server) -> Tenant:
    return Tenant(server, f"bodies_{secrets.token_hex(4)}")


def answer(connection: socket.socket) -> tuple[int, str]:
    """Return the status of a response, and its problem if it is one."""
    received = b""
    with suppress(ConnectionError):
        while data := connection.recv(1 << 16):
            received += data
            head, separator, body = received.partition(b"\r\n\r\n")
            if separator and body.rstrip().endswith((b"}", b"0")):
                break
    head, _, body = received.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    return status, body.partition(b'"type":"/problems/')[2].partition(b'"')[0].decode()


def flood(connection: socket.socket, limit: int) -> int:
    """Send chunks until the server answers or this many bytes were sent; return how many were sent."""
    sent = 0
    connection.setblocking(False)
    try:
        while sent < limit:
            try:
                if connection.recv(1, socket.MSG_PEEK):
                    break
            except BlockingIOError:
                pass
            connection.settimeout(60)
            connection.sendall(b"%x\r\n" % len(CHUNK) + CHUNK + b"\r\n")
            connection.setblocking(False)
            sent += len(CHUNK)
    except ConnectionError:
        pass  # the connection was cut off after the answer was sent
    connection.settimeout(60)
    return sent


@pytest.mark.parametrize("size", [QUOTA + 1, 300 << 20])
@pytest.mark.parametrize("kind", ["file", "form", "text", "block"])
def test_body_declared_over_the_quota_is_answered_before_it_is_sent(tenant: Tenant, kind: str, size: int):
    """No byte of the body is sent: a server that waits for one would never answer."""
    file = tenant.client.put(f"{tenant.files}?path=a", content=b"abc").json()
    upload = tenant.client.post(f"/v1/datasets/{tenant.name}/uploads", json={"length": 5, "path": "u"})
    before = len(tenant.stored)
    form = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    path = {
        "file": f"{tenant.files}?path=a",
        "form": f"{tenant.files}?path=a",
        "text": f"{tenant.files}/{file['checksum']}/text/ocr",
        "block": f"{upload.headers['Location']}?offset=0",
    }[kind]
    of_form = kind == "form"
    media = "multipart/form-data; boundary=x" if of_form else "application/octet-stream"
    # The metadata of the file may be as large as a document.
    size += 2 << 20 if of_form else 0

    with tenant.sending(
        "POST" if of_form else "PUT", path, f"Content-Length: {size}", f"Content-Type: {media}"
    ) as connection:
        if of_form:
            connection.sendall(form)
        assert answer(connection) == (429, "quota-exceeded")

    assert (len(tenant.stored), tenant.used) == (before, 3 + 5)


@pytest.mark.parametrize("kind", ["file", "text"])
def test_body_of_unknown_length_is_cut_off_at_the_quota_and_stores_nothing(tenant: Tenant, kind: str):
    file = tenant.client.put(f"{tenant.files}?path=a", content=b"abc").json()
    path = f"{tenant.files}?path=b" if kind == "file" else f"{tenant.files}/{file['checksum']}/text/ocr"
    before = len(tenant.stored)

    with tenant.sending("PUT", path, "Transfer-Encoding: chunked") as connection:
        sent = flood(connection, 300 << 20)
        assert answer(connection) == (429, "quota-exceeded")

    assert sent <= QUOTA + IN_FLIGHT
    assert (len(tenant.stored), tenant.used) == (before, 3)
    assert tenant.client.put(f"{tenant.files}?path=b", content=bytes(QUOTA - 3)).status_code == 201


def test_reservation_of_a_client_that_disconnects_is_released(tenant: Tenant):
    with tenant.sending("PUT", f"{tenant.files}?path=a", f"Content-Length: {QUOTA}") as connection:
        connection.sendall(CHUNK * 32)
    with tenant.sending("PUT", f"{tenant.files}?path=a", f"Content-Length: {QUOTA}"):
        pass

    wait_until(lambda: tenant.used == 0)
    assert tenant.client.put(f"{tenant.files}?path=b", content=bytes(QUOTA)).status_code == 201


def test_concurrent_bodies_of_one_tenant_share_its_quota(tenant: Tenant):
    with tenant.sending("PUT", f"{tenant.files}?path=a", f"Content-Length: {QUOTA}") as first:
        first.sendall(CHUNK)
        wait_until(lambda: tenant.used == QUOTA)
        with tenant.sending("PUT", f"{tenant.files}?path=b", f"Content-Length: {QUOTA}") as second:
            assert answer(second) == (429, "quota-exceeded")
        first.sendall(bytes(QUOTA - len(CHUNK)))
        assert answer(first)[0] == 201

    assert tenant.used == QUOTA
    assert [file["path"] for file in tenant.client.get(tenant.files).json()["results"]] == ["a"]
