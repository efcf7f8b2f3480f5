"""The command as a process: exit codes, pipes, prompts, and the modules that it imports."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tarn.cli.failures import Misuse, exit_code
from tarn_client import IncompleteResponse, InvalidRequest, JobCancelled, Problem, Unreachable

from tests.cli.conftest import TARN, Tarn
from tests.server import Server, clean_environment

DOCS = Path(__file__).parents[2] / "docs"
NOWHERE = "http://127.0.0.1:1"


def run(server: Server, *args: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = clean_environment(TARN_URL=server.url, **variables)
    return subprocess.run(
        [*TARN, *args],
        cwd=cwd or server.folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def test_caller_in_the_servers_folder_is_the_administrator(server: Server):
    done = run(server, "whoami", "--json")

    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["tenant"] == "admin"


def test_missing_key_is_reported_with_what_to_do(server: Server, tmp_path: Path):
    refused = run(server, "whoami", cwd=tmp_path)

    assert (refused.returncode, refused.stdout) == (1, "")
    assert "(unauthenticated)" in refused.stderr
    assert "no key was sent: set TARN_KEY" in refused.stderr


def test_unreachable_server_is_reported_with_what_to_do(server: Server):
    failed = run(server, "datasets", "list", "--url", NOWHERE)

    assert (failed.returncode, failed.stdout) == (3, "")
    assert failed.stderr == (
        f"tarn: no server answers at {NOWHERE}: [Errno 111] Connection refused\n"
        "    start a server with make run or tarn serve, or name another one with --url\n"
    )


def test_interrupted_load_exits_with_130_and_stores_nothing(server: Server, tarn: Tarn, dataset: str):
    line = b'{"id": "jane", "schema": "Person", "properties": {"name": ["Jane"]}}\n'
    with subprocess.Popen(
        [*TARN, "load", "--dataset", dataset],
        cwd=server.folder,
        env=clean_environment(TARN_URL=server.url),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        # More than fits into a pipe and the first piece: when it is written, the command has begun to send.
        process.stdin.write(line * 10_000)
        process.stdin.flush()
        process.send_signal(signal.SIGINT)
        code = process.wait(60)
        process.stdin.close()

    assert code == 130
    assert tarn("entities", "query", dataset).stdout == ""


def test_exit_codes_equal_those_in_the_docs_and_in_the_help(server: Server):
    documented = set(re.findall(r"^\| (\d+) \|", (DOCS / "clients.md").read_text(), re.MULTILINE))
    errors = (Problem({}), JobCancelled(), Misuse(), InvalidRequest(), Unreachable(""), IncompleteResponse())
    known = {str(exit_code(error)) for error in errors}

    assert documented == {"0", "130", *known}
    assert all(f"{code} " in run(server, "--help").stdout.partition("Exit codes:")[2] for code in sorted(known))


@pytest.mark.parametrize("args", [("whoami", "--nonsense"), ("nonsense",), ("tenants", "show"), ("whoami", "--url=x")])
def test_wrong_usage_exits_with_2_and_prints_to_standard_error_only(server: Server, args: tuple[str, ...]):
    failed = run(server, *args)

    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr


def test_invalid_setting_exits_with_2_and_one_sentence(server: Server):
    failed = run(server, "migrate", TARN_PORT="many")

    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr.startswith("tarn: TARN_PORT: ")
    assert failed.stderr.count("\n") == 1


def test_version_is_that_of_the_package(server: Server):
    assert run(server, "--version").stdout == "tarn 0.1.0\n"


def test_worker_accepts_the_hidden_option_that_serve_passes(server: Server, tmp_path: Path):
    accepted = run(server, "worker", "--until-stdin-closes", cwd=tmp_path, TARN_PORT="many")

    assert accepted.stderr.startswith("tarn: TARN_PORT: ")
    assert "until-stdin" not in run(server, "worker", "--help").stdout


def test_shell_script_creates_tenant_key_and_dataset(server: Server, name: str):
    script = """
        set -eu
        tarn() { "$PYTHON" -m tarn.cli "$@"; }
        tarn tenants create "$NAME" > /dev/null
        tarn grants add "$NAME" "${NAME}_*" admin > /dev/null
        KEY=$(tarn keys create "$NAME" --quiet)
        TARN_KEY=$KEY tarn datasets create "${NAME}_leaks" --title 'Some leaks' > /dev/null
        TARN_KEY=$KEY tarn datasets list | tail -n +2
    """
    done = subprocess.run(
        ["/bin/sh", "-c", script],
        cwd=server.folder,
        env=clean_environment(TARN_URL=server.url, NAME=name, PYTHON=sys.executable),
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()[:3] == [f"{name}_leaks", "Some", "leaks"]


@pytest.mark.parametrize(("answer", "code", "exit_of_show"), [("y", 0, 1), ("yes", 0, 1), ("n", 2, 0), ("", 2, 0)])
def test_delete_on_a_terminal_asks_for_confirmation(
    server: Server, tarn: Tarn, tenant: str, answer: str, code: int, exit_of_show: int
):
    terminal, stdin = pty.openpty()
    with subprocess.Popen(
        [*TARN, "tenants", "delete", tenant],
        cwd=server.folder,
        env=clean_environment(TARN_URL=server.url),
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        os.write(terminal, f"{answer}\n".encode())
        out, err = process.communicate(timeout=60)
    os.close(stdin)
    os.close(terminal)

    assert (process.returncode, out) == (code, "")
    assert f"Delete the tenant {tenant} with its keys and grants? [y/N] " in err
    tarn("tenants", "show", tenant, code=exit_of_show)


def test_reader_that_stops_early_ends_the_command_without_a_traceback(server: Server):
    done = subprocess.run(
        ["/bin/sh", "-c", '"$PYTHON" -m tarn.cli audit --json | head -n 1'],
        cwd=server.folder,
        env=clean_environment(TARN_URL=server.url, PYTHON=sys.executable),
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.stdout, done.stderr) == ("[\n", "")


@pytest.mark.parametrize(
    ("args", "forbidden"),
    [
        (["--help"], {"httpx", "yaml", "pydantic", "sqlalchemy", "followthemoney", "fastapi", "pyspark"}),
        (["whoami"], {"yaml", "pydantic", "sqlalchemy", "followthemoney", "fastapi", "pyspark"}),
    ],
)
def test_client_commands_import_no_server_module(server: Server, args: list[str], forbidden: set[str]):
    code = (
        "import sys; from tarn.cli import main; sys.argv[1:] = " + repr(args) + "\n"
        "try: main()\n"
        "finally: print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=server.folder,
        env=clean_environment(TARN_URL=server.url),
        capture_output=True,
        text=True,
        check=False,
    )

    loaded = set(done.stderr.split())
    assert done.returncode == 0
    assert {"tarn.cli.application", "typer"} <= loaded
    assert loaded & forbidden == set()
    assert {module for module in loaded if module.startswith("tarn.") and not module.startswith("tarn.cli")} == set()
