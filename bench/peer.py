"""The closest peer's figures on the same file, where its environment can be made."""

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
"""What the peer leaves open and does not run with in its newest version."""


def figures(path: Path) -> dict[str, Any] | None:
    """What the peer measures of itself, and `bytes`, the data files of its store; None where it is not to be had."""
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
        found: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
        logs = Path(folder).glob("*/*/**/_delta_log")
        found["bytes"] = sum(_bytes(log.parent) for log in logs)
    return found


def _bytes(table: Path) -> int:
    """What its newest version names: former files are left behind by it as by others."""
    return sum(pa.table(DeltaTable(str(table)).get_add_actions())["size_bytes"].to_pylist())
