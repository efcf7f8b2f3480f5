"""A reader's terminal: one shell and one Python prompt for a page, in a folder that looks like a clone."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Timer

from tests.docs.pages import ROOT, Block
from tests.server import Server, clean_environment

ADDRESS = "http://127.0.0.1:8000"
"""Where pages say that the server listens."""

BLOCK_TIMEOUT = 600
"""Seconds for one block."""

# A command that fails, also inside a pipe, ends the shell; what a block exports or defines is there for the next.
SHELL = """
set -e -u -o pipefail
while IFS= read -r block; do
    source "$block" > "$block.out" 2>&1 < /dev/null
    env -0 > "$block.env"
    echo done
done
"""


class Failed(AssertionError):
    """A block did not do what its page says."""


class Terminal:
    """What a reader pastes blocks into, one after the other."""

    def __init__(self, folder: Path, server: Server, **given: str) -> None:
        """What is given is set in it beforehand."""
        self._pasted, self._folder = folder / "pasted", folder / "clone"
        self._pasted.mkdir()
        self._folder.mkdir()
        for name in _cloned():
            (self._folder / name).symlink_to(ROOT / name)
        (self._folder / ".venv").symlink_to(sys.prefix)
        (self._folder / ".tools").symlink_to(ROOT / ".tools")
        (self._folder / "data").symlink_to(server.folder / "data")
        self._url = server.url
        self._environment = clean_environment(
            TARN_URL=server.url,
            PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            PYTHONPATH=os.pathsep.join(map(str, (ROOT, ROOT / "clients" / "python"))),
            HOME=str(folder),
            COLUMNS="120",
            **given,
        )
        self._shell = _LineProcess(["bash", "-c", SHELL], self._folder, self._environment)
        self._prompt = _LineProcess([sys.executable, "-m", "tests.docs.prompt"], self._folder, self._environment)
        self._count = 0

    def close(self) -> None:
        self._shell.end()
        self._prompt.end()

    def paste(self, block: Block) -> str:
        """Run a block, and return what it printed. Raises `Failed`, with what it printed, if a command of it fails."""
        self._count += 1
        file = self._pasted / f"{self._count:03}"
        file.write_text(block.text.replace(ADDRESS, self._url))
        if block.language == "python":
            asked = {"file": str(file), "place": block.place, "environment": self._environment}
            answer = self._prompt.ask(json.dumps(asked))
        else:
            answer = self._shell.ask(str(file))
        printed = Path(f"{file}.out").read_text().replace(self._url, ADDRESS)
        if answer != "done":
            raise Failed(f"{block.place}: this block failed:\n{block.text}\nIt printed:\n{printed}")
        if block.language != "python":
            # What the shell exports, the prompt of the same reader has too.
            pairs = Path(f"{file}.env").read_text().split("\0")
            self._environment = dict(pair.split("=", 1) for pair in pairs if pair)
        return printed

    def write(self, block: Block) -> None:
        """Put a block into the file that it is the content of."""
        (self._folder / block.marks["file"]).write_text(block.text)


class _LineProcess:
    """A process that is told a line, and answers with one; none, if it ended."""

    def __init__(self, command: list[str], folder: Path, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def ask(self, line: str) -> str:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{line}\n")
        process.stdin.flush()
        late = Timer(BLOCK_TIMEOUT, process.kill)
        late.start()
        answer = process.stdout.readline()
        late.cancel()
        return answer.strip()

    def end(self) -> None:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.wait(10)
        process.stdout.close()
        with suppress(ProcessLookupError):  # a page that failed has not ended what it started
            os.killpg(process.pid, signal.SIGKILL)


def _cloned() -> list[str]:
    """What is at the top of a clone."""
    made = {"data", "build", "dist"}
    return [path.name for path in ROOT.iterdir() if not path.name.startswith(".") and path.name not in made]
