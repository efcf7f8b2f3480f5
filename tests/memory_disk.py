"""The folder of temporary files of tests: in memory, if there is room.

Tarn syncs what it writes to a disk, and so do PostgreSQL and SQLite with every commit: thousands of tests would spend
most of their time waiting for the disk. No test simulates a power failure, and what a killed process has written is
there for the next one, in memory as on a disk.
"""

import os
import tempfile
from pathlib import Path

import psutil

MEMORY = Path("/dev/shm")
ROOM = 8 << 30
"""Bytes that must be free, both in memory and on the file system: the largest test writes one gibibyte, and several
run concurrently.
"""


def use_memory() -> None:
    """Create temporary files in memory from here on, in this process and its children, unless `TMPDIR` is set."""
    if "TMPDIR" in os.environ or not MEMORY.is_dir() or not os.access(MEMORY, os.W_OK):
        return
    if min(psutil.disk_usage(str(MEMORY)).free, psutil.virtual_memory().available) < ROOM:
        return
    os.environ["TMPDIR"] = str(MEMORY)
    tempfile.tempdir = None
