"""Progress reports, which are shown on a terminal only."""

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
    """Run the command with standard error, or both outputs, on a terminal; return exit code, output and screen."""
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
            screen = _read_all(terminal)
        os.close(terminal)
        printed.seek(0)
        return process.returncode, printed.read(), screen


def _read_all(terminal: int) -> str:
    screen = b""
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # raised on Linux when the other end is closed
            piece = b""
        if not piece:
            return screen.decode()
        screen += piece


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


def test_load_on_a_terminal_shows_rows_rate_and_remaining_time(server: Server, dataset: str, file: str):
    code, printed, screen = on_terminal(server, "entities", "load", dataset, file)

    last = screen.replace("\x1b[2K", "\r").rstrip("\r\n\x1b[?25h").split("\r")[-1]
    assert code == 0
    assert "2000" in printed
    assert "sending" in last
    assert "2,000 rows, " in last
    assert "/s, " in last
    assert "00:0" in last


def test_query_shows_progress_if_its_lines_are_not_on_the_terminal(
    server: Server, tarn: Tarn, dataset: str, file: str, tmp_path: Path
):
    tarn("entities", "load", dataset, file)

    _, lines, screen_of_query = on_terminal(server, "entities", "query", dataset)
    _, nothing, screen_of_file = on_terminal(server, "statements", "query", dataset, "-o", str(tmp_path / "s.csv"))

    assert (lines.count("\n"), nothing) == (2000, "")
    assert "2,000 rows, " in screen_of_query
    assert "4,001 rows, " in screen_of_file


def test_query_whose_lines_are_on_the_terminal_shows_no_progress(server: Server, tarn: Tarn, dataset: str, file: str):
    tarn("entities", "load", dataset, file)

    _, _, screen = on_terminal(server, "entities", "query", dataset, "--limit", "2", stdout=True)

    assert [json.loads(line)["id"] for line in screen.splitlines()] == ["p0", "p1"]


def test_control_characters_are_escaped_on_a_terminal_and_unchanged_in_a_pipe(server: Server, tarn: Tarn, dataset: str):
    odd = {"id": "odd", "schema": "Person", "properties": {"notes": ["a\u009b2Jb\u202ec ü"]}}
    tarn("entities", "load", dataset, "-", stdin=json.dumps(odd))

    _, _, screen = on_terminal(server, "entities", "query", dataset, stdout=True)
    piped = in_pipe(server, "entities", "query", dataset).stdout

    assert ("\u009b" in screen, "\u202e" in screen, "ü" in screen) == (False, False, True)
    assert json.loads(screen) == json.loads(piped)


def test_binary_format_is_refused_on_a_terminal(server: Server, dataset: str):
    code, _, screen = on_terminal(server, "statements", "query", dataset, "--format", "parquet", stdout=True)

    assert (code, screen) == (2, "tarn: this format is binary: write it to a file with -o, or to a pipe\r\n")


@pytest.mark.parametrize("option", ["--quiet", "--json"])
def test_quiet_and_json_show_no_progress_on_a_terminal(server: Server, dataset: str, file: str, option: str):
    _, _, while_loading = on_terminal(server, "entities", "load", dataset, file, option)
    _, _, while_reading = on_terminal(server, "entities", "query", dataset, option)

    assert (while_loading, while_reading) == ("", "")


def test_progress_is_not_written_to_a_pipe(server: Server, dataset: str, file: str):
    loaded = in_pipe(server, "entities", "load", dataset, file)
    read = in_pipe(server, "entities", "query", dataset)

    assert (loaded.stderr, read.stderr) == ("", "")
    assert read.stdout.count("\n") == 2000


def test_progress_bar_of_a_failed_command_is_erased_before_the_error(server: Server):
    code, _, screen = on_terminal(server, "entities", "query", "nonsense")

    assert code == 1
    assert screen.splitlines()[-1] == "\x1b[1A\x1b[2Ktarn: there is no dataset 'nonsense' (dataset-not-found)"


@pytest.mark.parametrize(
    ("size", "rows", "seconds", "text"),
    [
        (0, 0, 0.0, "0 B, 0 B/s"),
        (2_500_000, 5000, 2.0, "5,000 rows, 2,500/s, 2.5 MB"),
        (3_000_000_000, 0, 10.0, "3.0 GB, 300.0 MB/s"),
        (5_000_000_000_000, 0, 1000.0, "5,000.0 GB, 5.0 GB/s"),
    ],
)
def test_progress_has_rows_bytes_and_rates(size: int, rows: int, seconds: float, text: str):
    assert describe(size, rows, seconds) == text
