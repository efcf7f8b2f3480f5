"""Progress: on a terminal, and nowhere else."""

import fcntl
import json
import os
import pty
import struct
import subprocess
import tempfile
import termios
from pathlib import Path

import pytest
from tarn.cli.output.progress import describe

from tests.cli.conftest import TARN, Tarn
from tests.server import Server, clean_environment

ENTITIES = "".join(
    json.dumps({"id": f"p{number}", "schema": "Person", "properties": {"name": ["X"]}}) + "\n" for number in range(2000)
)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "people.ndjson"
    path.write_text(ENTITIES)
    return str(path)


def on_terminal(server: Server, *args: str, stdout: bool = False) -> tuple[int, str, str]:
    """Run the command with its standard error, or both outputs, on a terminal: exit code, output, and what is seen."""
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
    # Not a pipe, which would have to be read while the terminal is.
    with tempfile.TemporaryFile("w+") as printed:
        with subprocess.Popen(
            [*TARN, *args],
            cwd=server.folder,
            env=clean_environment(TARN_URL=server.url, TERM="xterm-256color"),
            stdin=subprocess.DEVNULL,
            stdout=end if stdout else printed,
            stderr=end,
        ) as process:
            os.close(end)
            seen = _everything(terminal)
        os.close(terminal)
        printed.seek(0)
        return process.returncode, printed.read(), seen


def _everything(terminal: int) -> str:
    seen = b""
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # what Linux says when the other end is closed
            piece = b""
        if not piece:
            return seen.decode()
        seen += piece


def in_pipe(server: Server, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TARN, *args],
        cwd=server.folder,
        env=clean_environment(TARN_URL=server.url),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )


def test_load_shows_rows_rate_and_time_left_on_a_terminal_and_the_result_as_ever(
    server: Server, dataset: str, file: str
):
    code, printed, seen = on_terminal(server, "entities", "load", dataset, file)

    last = seen.replace("\x1b[2K", "\r").rstrip("\r\n\x1b[?25h").split("\r")[-1]
    assert code == 0
    assert "2000" in printed
    assert "sending" in last
    assert "2,000 rows, " in last
    assert "/s, " in last
    assert "00:0" in last


def test_query_shows_progress_while_its_lines_go_elsewhere(
    server: Server, tarn: Tarn, dataset: str, file: str, tmp_path: Path
):
    tarn("entities", "load", dataset, file)

    _, lines, beside_lines = on_terminal(server, "entities", "query", dataset)
    _, nothing, beside_file = on_terminal(server, "statements", "query", dataset, "-o", str(tmp_path / "s.csv"))

    assert (lines.count("\n"), nothing) == (2000, "")
    assert "2,000 rows, " in beside_lines
    assert "4,001 rows, " in beside_file


def test_query_on_a_terminal_shows_its_lines_and_no_progress_between_them(
    server: Server, tarn: Tarn, dataset: str, file: str
):
    tarn("entities", "load", dataset, file)

    _, _, seen = on_terminal(server, "entities", "query", dataset, "--limit", "2", stdout=True)

    assert [json.loads(line)["id"] for line in seen.splitlines()] == ["p0", "p1"]


def test_what_could_steer_a_terminal_is_escaped_on_one_and_whole_in_a_pipe(server: Server, tarn: Tarn, dataset: str):
    odd = {"id": "odd", "schema": "Person", "properties": {"notes": ["a\u009b2Jb\u202ec ü"]}}
    tarn("entities", "load", dataset, "-", stdin=json.dumps(odd))

    _, _, seen = on_terminal(server, "entities", "query", dataset, stdout=True)
    piped = in_pipe(server, "entities", "query", dataset).stdout

    assert ("\u009b" in seen, "\u202e" in seen, "ü" in seen) == (False, False, True)
    assert json.loads(seen) == json.loads(piped)


def test_form_that_is_not_text_is_kept_from_a_terminal(server: Server, dataset: str):
    code, _, seen = on_terminal(server, "statements", "query", dataset, "--format", "parquet", stdout=True)

    assert (code, seen) == (2, "tarn: this format is binary: write it to a file with -o, or to a pipe\r\n")


@pytest.mark.parametrize("silence", ["--quiet", "--json"])
def test_who_asks_for_silence_gets_it_on_a_terminal_too(server: Server, dataset: str, file: str, silence: str):
    _, _, while_loading = on_terminal(server, "entities", "load", dataset, file, silence)
    _, _, while_reading = on_terminal(server, "entities", "query", dataset, silence)

    assert (while_loading, while_reading) == ("", "")


def test_pipe_sees_nothing_of_it(server: Server, dataset: str, file: str):
    loaded = in_pipe(server, "entities", "load", dataset, file)
    read = in_pipe(server, "entities", "query", dataset)

    assert (loaded.stderr, read.stderr) == ("", "")
    assert read.stdout.count("\n") == 2000


def test_bar_of_what_fails_goes_away_before_the_sentence(server: Server):
    code, _, seen = on_terminal(server, "entities", "query", "nonsense")

    assert code == 1
    assert seen.splitlines()[-1] == "\x1b[1A\x1b[2Ktarn: there is no dataset 'nonsense' (dataset-not-found)"


@pytest.mark.parametrize(
    ("size", "rows", "seconds", "text"),
    [
        (0, 0, 0.0, "0 B, 0 B/s"),
        (2_500_000, 5000, 2.0, "5,000 rows, 2,500/s, 2.5 MB"),
        (3_000_000_000, 0, 10.0, "3.0 GB, 300.0 MB/s"),
        (5_000_000_000_000, 0, 1000.0, "5,000.0 GB, 5.0 GB/s"),
    ],
)
def test_progress_is_told_in_rows_and_bytes(size: int, rows: int, seconds: float, text: str):
    assert describe(size, rows, seconds) == text
