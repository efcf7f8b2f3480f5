"""`tarn top`: the activity of the lake."""

import os
import pty
import signal
import subprocess
from datetime import UTC, datetime

import pytest
from tarn.cli.commands.administration.top import how_far, since, summary

from tests.cli.conftest import TARN, Tarn
from tests.server import Server, clean_environment


def test_top_in_a_pipe_prints_journals_and_tenants_once(tarn: Tarn, dataset: str, tenant: str):
    tarn("entities", "load", dataset, "-", stdin='{"id": "jane", "schema": "Person", "properties": {"name": ["Jane"]}}')

    shown = tarn("top").stdout
    journal, of_tenant = (line.split() for line in shown.splitlines() if line.startswith(dataset))
    document = tarn.json("top")

    assert " rows wait in " in shown.splitlines()[0]
    assert (journal[:2], of_tenant) == ([dataset, "2"], [tenant, "0", "0", "0"])
    assert {each["dataset"]: each["rows"] for each in document["journal"]}[dataset] == 2
    assert tenant in {each["tenant"] for each in document["tenants"]}
    assert tarn("top", "--once").stdout.splitlines()[0].endswith("workers")


def test_top_requires_the_administrator(server: Server, tarn: Tarn, tenant: str):
    key = tarn("keys", "create", tenant, "--quiet").stdout.strip()

    assert "(forbidden)" in Tarn(server.url, key)("top", code=1).stderr


def test_top_on_a_terminal_is_updated_until_interrupted_and_restores_the_screen(server: Server):
    terminal, end = pty.openpty()
    with subprocess.Popen(
        [*TARN, "top", "--every", "0.1"],
        cwd=server.folder,
        env=clean_environment(TARN_URL=server.url, TERM="xterm-256color"),
        stdin=subprocess.DEVNULL,
        stdout=end,
        stderr=end,
    ) as process:
        os.close(end)
        screen = b""
        while screen.count(b" rows wait in ") < 3:
            screen += os.read(terminal, 65536)
        process.send_signal(signal.SIGINT)
        while b"\x1b[?1049l" not in screen:
            screen += os.read(terminal, 65536)
        code = process.wait(30)
    os.close(terminal)

    assert code == 0
    assert screen.count(b"\x1b[?1049h") == screen.count(b"\x1b[?1049l") == 1


NOW = datetime(2030, 1, 1, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("moment", "text"),
    [
        (None, "-"),
        ("2030-01-01T12:00:05Z", "0 s"),
        ("2030-01-01T11:58:01Z", "119 s"),
        ("2030-01-01T11:00:00Z", "60 min"),
        ("2029-12-31T12:00:00Z", "24 h"),
    ],
)
def test_age_is_shown_in_one_unit(moment: str | None, text: str):
    assert since(moment, NOW) == text


def test_summary_and_progress_are_formatted():
    work = {
        "journal": [
            {"dataset": "a", "rows": 1000, "oldest": "2030-01-01T11:59:50Z"},
            {"dataset": "b", "rows": 234, "oldest": "2030-01-01T11:59:55Z"},
        ],
        "running": [{}],
        "jobs": [{"state": "queued", "jobs": 2}, {"state": "done", "jobs": 9}, {"state": "queued", "jobs": 1}],
        "workers": [{}, {}],
    }

    assert summary(work, NOW) == (
        "1,234 rows wait in 2 journals, the oldest for 10 s; 1 jobs run and 3 wait; 2 workers"
    )
    assert how_far({"done": 1200, "total": 5000, "unit": "files"}) == "1,200 of 5,000 files"
    assert how_far({"done": 3, "total": None, "unit": "rows"}) == "3 rows"
