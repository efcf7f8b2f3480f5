"""Bytes over a socket between this process and a child of it."""

import socket


def exactly(peer: socket.socket, size: int) -> bytearray:
    """Wait for so many bytes. Raises EOFError if the other side is gone."""
    found, filled = bytearray(size), 0
    while filled < size:
        # All of it by one call, unless a signal comes between.
        got = peer.recv_into(memoryview(found)[filled:], 0, socket.MSG_WAITALL)
        if not got:
            raise EOFError
        filled += got
    return found
