"""The closest peer's figures on the same file, where its environment can be made."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[2] / "shared" / "peer_bench.py"
HOME = Path(".tools") / "peer"
PINS = ["nomenklatura==4.16.0"]
"""What the peer leaves open and does not run with in its newest version."""


def figures(path: Path) -> dict[str, Any] | None:
    """What the peer measures of itself, or None where it is not to be had."""
    if not SCRIPT.exists():
        return None
    python = HOME / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, SCRIPT, "--install", HOME], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PINS], check=True)
    ran = subprocess.run([python, SCRIPT, path], check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    return found
