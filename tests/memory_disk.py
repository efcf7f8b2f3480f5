"""Where tests keep their files: in memory, where there is room for them.

Everything that Tarn writes to a disk is synced, and so is what PostgreSQL and SQLite commit: thousands of tests that
wait for a disk take longer than what they show. Nothing here pulls a plug: what a killed process has written is there
for the next one, in memory as on a disk.
"""

import os
import tempfile
from pathlib import Path

import psutil

MEMORY = Path("/dev/shm")
ROOM = 8 << 30
"""Bytes that must be free, as memory and as a disk: the largest case writes one, and several run at once."""


def use_memory() -> None:
    """Make temporary files in memory from here on, in this process and those that it starts; unless `TMPDIR` is set."""
    if "TMPDIR" in os.environ or not MEMORY.is_dir() or not os.access(MEMORY, os.W_OK):
        return
    if min(psutil.disk_usage(str(MEMORY)).free, psutil.virtual_memory().available) < ROOM:
        return
    os.environ["TMPDIR"] = str(MEMORY)
    tempfile.tempdir = None
