"""Every block of every page, pasted by a newcomer beside a running server."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from tests.conftest import copied_postgresql
from tests.docs.expected_output import differences
from tests.docs.pages import ROOT, Block, blocks, pages, ports
from tests.docs.terminal import ADDRESS, Failed, Terminal
from tests.s3 import VERSITYGW, free_port
from tests.server import Server, running
from tests.ship.chart import CHART, NEWEST, helm

pytestmark = pytest.mark.xdist_group("docs")

RUN = {"sh", "bash", "python"}
SQL = {"sql"}
"""What an operator asks PostgreSQL."""
NOT_CODE = {"", "mermaid"}
"""Pictures and layouts, which nobody pastes."""

MAX_NOT_RUN = 15
"""Blocks that no test runs: few, so that nobody gets used to it."""

COMMAND = re.compile(r"^\s*(\$ |(export|tarn|curl|helm|kubectl|docker|make|pip|python|git|ftm) )", re.MULTILINE)


def _is_run(block: Block) -> bool:
    return block.language in RUN and "not run" not in block.marks


ALL = [block for page in pages() for block in blocks(page)]
PASTED = [page for page in pages() if any(map(_is_run, blocks(page)))]


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all pages, with the settings that a newcomer has."""
    with running(tmp_path_factory.mktemp("docs"), TARN_FLUSH_AGE="10", TARN_UPKEEP_EVERY="10") as server:
        yield server


@pytest.mark.parametrize("page", PASTED, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_works_when_pasted(page: Path, lake: Server, tmp_path: Path):
    if VERSITYGW.name in page.read_text() and not VERSITYGW.exists():
        pytest.skip("versitygw, which the page starts, is not built here")
    _run_page(page, lake, tmp_path)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("```sh\nNAME=jane\n```\n\n```sh\necho $NAME\n```\n\n```text\njoe\n```\n", "page.md:9: it printed something"),
        ("```sh\nfalse | cat\n```\n", "page.md:1: this block failed"),
        ("```sh\ntarn datasets show no_such_dataset\n```\n", "(dataset-not-found)"),
        ("```python\nname = 1\n```\n\n```python\nname + nobody\n```\n", "name 'nobody' is not defined"),
    ],
)
def test_page_that_does_not_work_is_told_by_its_line(wrong: str, told: str, lake: Server, tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(wrong)
    with pytest.raises(Failed) as failed:
        _run_page(page, lake, tmp_path)
    assert told in str(failed.value)


def test_every_block_is_run_or_says_why_not():
    for block in ALL:
        assert block.language in RUN | SQL | NOT_CODE or block.marks, (
            f"{block.place}: nothing runs a block of `{block.language}`"
        )
        assert block.language or not COMMAND.search(block.text), f"{block.place}: commands want ```sh, to be run"


def test_postgresql_answers_what_pages_ask_it(postgresql: str):
    asked = [block for block in ALL if block.language in SQL]
    assert asked
    with copied_postgresql(postgresql) as url, psycopg.connect(url.replace("+psycopg", "")) as connection:
        for block in asked:
            for query in filter(str.strip, block.text.split(";")):
                assert connection.execute(query.encode()).description, block.place


def test_reason_for_not_running_a_block_leads_to_what_checks_it():
    for block in ALL:
        if (why := block.marks.get("not run")) is not None:
            reason, _, instead = why.partition(";")
            paths = [path for path in re.findall(r"[\w./-]+", instead) if (ROOT / path).exists()]
            assert len(reason.split()) > 2, f"{block.place}: say why it is not run"
            assert paths, f"{block.place}: name the file, after a semicolon, that checks it instead"


def test_few_blocks_are_not_run():
    assert len([block for block in ALL if "not run" in block.marks]) <= MAX_NOT_RUN


def test_shell_that_is_not_run_is_shell():
    for block in ALL:
        if "not run" in block.marks and block.language in ("sh", "bash"):
            read = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, check=False)
            assert read.returncode == 0, f"{block.place}: {read.stderr}"


def test_chart_renders_with_every_value_that_a_page_gives_it(tmp_path: Path):
    given = [(block, command) for block in ALL for command in _commands(block, "helm")]
    assert given
    for block, (_, verb, *arguments) in given:
        assert verb in ("install", "upgrade", "template"), f"{block.place}: nothing checks `helm {verb}`"
        places = {"helm/tarn": CHART} | {name: tmp_path / name for name in _write_files(block.page, tmp_path)}
        flags = [places.get(argument, argument) for argument in arguments if argument not in ("--install", "--wait")]
        rendered = helm("template", *flags, "--kube-version", NEWEST)
        assert rendered.returncode == 0, f"{block.place}: {rendered.stderr}"
        assert "kind: Deployment" in rendered.stdout


def test_make_run_starts_the_server_that_pages_are_pasted_beside():
    recipe = re.search(r"^run:.*\n\t(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    assert recipe[1] == "$(BIN)/tarn serve"


@pytest.mark.parametrize(
    ("claimed", "printed", "holds"),
    [
        ("id  …\nname  jane", "id 0197-a\nname    jane  \n", True),
        ("id  …\nname  jane", "id 0197-a\nname joe\n", False),
        ("first\n…\nlast", "first\nlast\n", True),
        ("first\n…\nlast", "first\n1\n2\nlast\n", True),
        ("first\n…\nlast", "first\n1\n2\n", False),
        ("done", "done\nand more\n", False),
        ("a.c", "abc", False),
    ],
)
def test_claim_holds_of_what_it_describes_and_of_nothing_else(claimed: str, printed: str, holds: bool):
    assert (differences(claimed, printed) == []) is holds


def _run_page(page: Path, server: Server, folder: Path) -> None:
    """Do what a page says, block by block. Raises `Failed` where it does not hold."""
    given = {name: str(free_port()) for name in ports(page)}
    with closing(Terminal(folder, server, **given)) as terminal:
        for block in blocks(page):
            if "file" in block.marks:
                terminal.write(block)
            elif _is_run(block):
                _check_output(block, terminal.paste(block))
            elif block.text == "make run\n":
                _check_output(block, "".join(server.greeting).replace(server.url, ADDRESS))


def _check_output(block: Block, printed: str) -> None:
    """Compare what was printed with what the page says of it. Raises `Failed`."""
    if block.claim and (differing := differences(block.claim.text, printed)):
        raise Failed(f"{block.claim.place}: it printed something else:\n" + "\n".join(differing))


def _commands(block: Block, name: str) -> Iterator[list[str]]:
    """The lines of a block of shell that run one command, a list of words each."""
    if block.language in ("sh", "bash"):
        for line in block.text.replace("\\\n", " ").splitlines():
            if line.startswith(f"{name} "):
                yield shlex.split(line, comments=True)


def _write_files(page: Path, folder: Path) -> list[str]:
    files = [block for block in blocks(page) if "file" in block.marks]
    for block in files:
        (folder / block.marks["file"]).write_text(block.text)
    return [block.marks["file"] for block in files]
