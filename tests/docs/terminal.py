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
"""Address of the server in the pages."""

BLOCK_TIMEOUT = 600
"""Maximum seconds for one block."""

# A command that fails, also in a pipe, ends the shell. Variables and functions of a block are kept for the next one.
SHELL = """
set -e -u -o pipefail
while IFS= read -r block; do
    source "$block" > "$block.out" 2>&1 < /dev/null
    env -0 > "$block.env"
    echo done
done
"""


class Failed(AssertionError):
    """A block failed, or its output is not the expected one."""


class Terminal:
    """Runs the blocks of a page one after the other, as if a reader pasted them."""

    def __init__(self, folder: Path, server: Server, **variables: str) -> None:
        """Start shell and prompt with these environment variables."""
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
            PYTHONPATH=os.pathsep.join(map(str, (ROOT / "app", ROOT, ROOT / "clients" / "python"))),
            HOME=str(folder),
            COLUMNS="120",
            **variables,
        )
        self._shell = _LineProcess(["bash", "-c", SHELL], self._folder, self._environment)
        self._prompt = _LineProcess([sys.executable, "-m", "tests.docs.prompt"], self._folder, self._environment)
        self._count = 0

    def close(self) -> None:
        self._shell.end()
        self._prompt.end()

    def paste(self, block: Block) -> str:
        """Run a block and return its output. Raises `Failed`, with the output, if a command fails."""
        self._count += 1
        file = self._pasted / f"{self._count:03}"
        file.write_text(block.text.replace(ADDRESS, self._url))
        if block.language == "python":
            request = {"file": str(file), "location": block.location, "environment": self._environment}
            result = self._prompt.ask(json.dumps(request))
        else:
            result = self._shell.ask(str(file))
        output = Path(f"{file}.out").read_text().replace(self._url, ADDRESS)
        if result != "done":
            raise Failed(f"{block.location}: this block failed:\n{block.text}\nIt printed:\n{output}")
        if block.language != "python":
            # The Python prompt gets the environment variables that the shell exports.
            pairs = Path(f"{file}.env").read_text().split("\0")
            self._environment = dict(pair.split("=", 1) for pair in pairs if pair)
        return output

    def write(self, block: Block) -> None:
        """Write a block to the file that its mark names."""
        (self._folder / block.marks["file"]).write_text(block.text)


class _LineProcess:
    """A process that answers each line on its standard input with a line; with an empty one if it has ended."""

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
        timeout = Timer(BLOCK_TIMEOUT, process.kill)
        timeout.start()
        response = process.stdout.readline()
        timeout.cancel()
        return response.strip()

    def end(self) -> None:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.wait(10)
        process.stdout.close()
        with suppress(ProcessLookupError):  # a page that failed may have left processes
            os.killpg(process.pid, signal.SIGKILL)


def _cloned() -> list[str]:
    """Return the names at the top of a clone."""
    generated = {"data", "build", "dist"}
    return [path.name for path in ROOT.iterdir() if not path.name.startswith(".") and path.name not in generated]
