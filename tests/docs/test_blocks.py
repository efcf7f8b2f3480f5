"""Every block of every page, run against a server as if a reader pasted it."""

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
from tests.docs.pages import ROOT, SITE, Block, blocks, pages, ports
from tests.docs.terminal import ADDRESS, Failed, Terminal
from tests.s3 import VERSITYGW, free_port
from tests.server import Server, running
from tests.ship.chart import CHART, NEWEST, helm

pytestmark = pytest.mark.xdist_group("docs")

RUN = {"sh", "bash", "python"}
SQL = {"sql"}
"""Languages of queries for operators, run on PostgreSQL."""
NOT_CODE = {"", "mermaid"}
"""Languages of diagrams and layouts."""

MAX_NOT_RUN = 15
"""Maximum number of blocks that no test runs, so that they stay exceptions."""

COMMAND = re.compile(r"^\s*(\$ |(export|tarn|curl|helm|kubectl|docker|make|pip|python|git|ftm) )", re.MULTILINE)


def _is_run(block: Block) -> bool:
    return block.language in RUN and "not run" not in block.marks


ALL = [block for page in pages() for block in blocks(page)]
PASTED = [page for page in pages() if any(map(_is_run, blocks(page)))]
ALWAYS_PASTED = [ROOT / "README.md", SITE / "api.md"]
"""Pages that `make test` runs: the first steps, and the API with curl. `make test-all` runs all of them."""


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start one server for all pages, with default settings."""
    with running(tmp_path_factory.mktemp("docs"), TARN_FLUSH_AGE="10", TARN_MAINTENANCE_INTERVAL="10") as server:
        yield server


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[] if page in ALWAYS_PASTED else pytest.mark.long) for page in PASTED],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_page_works_when_pasted(page: Path, lake: Server, tmp_path: Path):
    if VERSITYGW.name in page.read_text() and not VERSITYGW.exists():
        pytest.skip("versitygw, which the page starts, is not built here")
    _run_page(page, lake, tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```sh\nNAME=jane\n```\n\n```sh\necho $NAME\n```\n\n```text\njoe\n```\n", "page.md:9: the output differs"),
        ("```sh\nfalse | cat\n```\n", "page.md:1: this block failed"),
        ("```sh\ntarn datasets show no_such_dataset\n```\n", "(dataset-not-found)"),
        ("```python\nname = 1\n```\n\n```python\nname + undefined\n```\n", "name 'undefined' is not defined"),
    ],
)
def test_failure_of_a_page_names_the_line(text: str, message: str, lake: Server, tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(Failed) as failed:
        _run_page(page, lake, tmp_path)
    assert message in str(failed.value)


def test_every_block_is_run_or_has_a_reason():
    for block in ALL:
        assert block.language in RUN | SQL | NOT_CODE or block.marks, (
            f"{block.location}: nothing runs a block of `{block.language}`"
        )
        assert block.language or not COMMAND.search(block.text), (
            f"{block.location}: use ```sh for commands, so that they are run"
        )


def test_sql_of_the_pages_runs_on_postgresql(postgresql: str):
    queries = [block for block in ALL if block.language in SQL]
    assert queries
    with copied_postgresql(postgresql) as url, psycopg.connect(url.replace("+psycopg", "")) as connection:
        for block in queries:
            for query in filter(str.strip, block.text.split(";")):
                assert connection.execute(query.encode()).description, block.location


def test_reason_for_not_running_a_block_names_the_file_that_checks_it():
    for block in ALL:
        if (mark := block.marks.get("not run")) is not None:
            reason, _, instead = mark.partition(";")
            paths = [path for path in re.findall(r"[\w./-]+", instead) if (ROOT / path).exists()]
            assert len(reason.split()) > 2, f"{block.location}: give the reason why it is not run"
            assert paths, f"{block.location}: name the file, after a semicolon, that checks it instead"


def test_few_blocks_are_not_run():
    assert len([block for block in ALL if "not run" in block.marks]) <= MAX_NOT_RUN


def test_shell_blocks_that_are_not_run_are_valid_shell():
    for block in ALL:
        if "not run" in block.marks and block.language in ("sh", "bash"):
            read = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, check=False)
            assert read.returncode == 0, f"{block.location}: {read.stderr}"


def test_chart_renders_with_the_values_of_the_pages(tmp_path: Path):
    commands = [(block, command) for block in ALL for command in _commands(block, "helm")]
    assert commands
    for block, (_, verb, *arguments) in commands:
        assert verb in ("install", "upgrade", "template"), f"{block.location}: nothing checks `helm {verb}`"
        paths = {"helm/tarn": CHART} | {name: tmp_path / name for name in _write_files(block.page, tmp_path)}
        flags = [paths.get(argument, argument) for argument in arguments if argument not in ("--install", "--wait")]
        rendered = helm("template", *flags, "--kube-version", NEWEST)
        assert rendered.returncode == 0, f"{block.location}: {rendered.stderr}"
        assert "kind: Deployment" in rendered.stdout


def test_make_run_starts_the_server_of_the_pages():
    recipe = re.search(r"^run:.*\n\t(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    assert recipe[1] == "$(BIN)/tarn serve"


@pytest.mark.parametrize(
    ("expected", "actual", "equal"),
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
def test_expected_output_matches_only_equal_output(expected: str, actual: str, equal: bool):
    assert (differences(expected, actual) == []) is equal


def _run_page(page: Path, server: Server, folder: Path) -> None:
    """Run a page block by block. Raises `Failed` at the first block that fails or has other output."""
    variables = {name: str(free_port()) for name in ports(page)}
    with closing(Terminal(folder, server, **variables)) as terminal:
        for block in blocks(page):
            if "file" in block.marks:
                terminal.write(block)
            elif _is_run(block):
                _check_output(block, terminal.paste(block))
            elif block.text == "make run\n":
                _check_output(block, "".join(server.greeting).replace(server.url, ADDRESS))


def _check_output(block: Block, output: str) -> None:
    """Compare the output with the expected one. Raises `Failed`."""
    if block.expected_output and (differing := differences(block.expected_output.text, output)):
        raise Failed(f"{block.expected_output.location}: the output differs:\n" + "\n".join(differing))


def _commands(block: Block, name: str) -> Iterator[list[str]]:
    """Yield the calls of a command in a shell block, each as a list of words."""
    if block.language in ("sh", "bash"):
        for line in block.text.replace("\\\n", " ").splitlines():
            if line.startswith(f"{name} "):
                yield shlex.split(line, comments=True)


def _write_files(page: Path, folder: Path) -> list[str]:
    files = [block for block in blocks(page) if "file" in block.marks]
    for block in files:
        (folder / block.marks["file"]).write_text(block.text)
    return [block.marks["file"] for block in files]
