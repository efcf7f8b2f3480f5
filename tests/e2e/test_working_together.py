"""The page on working together, pasted into a terminal beside a running server."""

import re
import subprocess
import sys
from pathlib import Path

from tests.server import clean_environment, running

PAGE = Path(__file__).parents[2] / "docs" / "working-together.md"


def test_page_works_when_pasted(tmp_path: Path):
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) > 5
    bin_folder = tmp_path / ".venv" / "bin"
    bin_folder.mkdir(parents=True)
    command = bin_folder / "tarn"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m app.cli "$@"\n')
    command.chmod(0o755)
    with running(tmp_path) as server:
        pasted = subprocess.run(
            ["bash", "-e", "-u"],
            input="\n".join(blocks),
            cwd=tmp_path,
            env=clean_environment(TARN_URL=server.url, PYTHONPATH=str(PAGE.parents[1])),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    assert pasted.returncode == 0, pasted.stdout + pasted.stderr
    assert "Jane Doe" in (tmp_path / "published.txt").read_text()
    assert pasted.stdout.count("time to publish") == 1
    assert pasted.stdout.count("press one is at it") == 1
    assert "force_release_lock" in pasted.stdout
