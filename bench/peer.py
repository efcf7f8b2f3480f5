"""Figures of the closest comparable project (the *peer*) on the same file, if it can be installed."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

SCRIPT = Path(__file__).parents[2] / "shared" / "peer_bench.py"
HOME = Path(".tools") / "peer"
PINS = ["nomenklatura==4.16.0"]
"""Dependencies that the peer does not pin, and whose newest versions it does not work with."""


def figures(path: Path) -> dict[str, Any] | None:
    """Run the peer's benchmark; return its figures and `bytes`, the size of its data files; None if unavailable."""
    if not SCRIPT.exists():
        return None
    python = HOME / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, SCRIPT, "--install", HOME], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PINS], check=True)
    with tempfile.TemporaryDirectory() as folder:
        ran = subprocess.run(
            [python, SCRIPT, path], check=True, capture_output=True, text=True, env=os.environ | {"TMPDIR": folder}
        )
        result: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
        logs = Path(folder).glob("*/*/**/_delta_log")
        result["bytes"] = sum(_bytes(log.parent) for log in logs)
    return result


def _bytes(table: Path) -> int:
    """Return the size of the files of the table's newest version; files of older versions are not counted."""
    return sum(pa.table(DeltaTable(str(table)).get_add_actions())["size_bytes"].to_pylist())
