"""Shell completion of commands and dataset names."""

import subprocess

import pytest

from tests.cli.conftest import TARN
from tests.server import Server, clean_environment


def completions(server: Server, *words: str, **variables: str) -> list[str]:
    """Return the completions that bash gets for the last of these words."""
    completion = {
        "_TARN_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(["tarn", *words]),
        "COMP_CWORD": str(len(words)),
    }
    environment = clean_environment(**{"TARN_URL": server.url, **variables}, **completion)
    done = subprocess.run(TARN, cwd=server.folder, env=environment, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(("words", "expected"), [(("ent",), ["entities"]), (("entities", "ad"), ["adjacent"])])
def test_commands_are_completed(server: Server, words: tuple[str, ...], expected: list[str]):
    assert completions(server, *words) == expected


def test_dataset_names_are_completed_by_the_server(server: Server, dataset: str):
    assert completions(server, "entities", "get", dataset[:8]) == [dataset]
    assert completions(server, "load", "--dataset", dataset[:8]) == [dataset]
    assert completions(server, "flush", dataset[:8]) == [dataset]


def test_completion_without_a_server_is_empty_and_prints_no_error(server: Server):
    assert completions(server, "entities", "get", "d", TARN_URL="http://127.0.0.1:1") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_of_a_shell_is_printed(server: Server, shell: str):
    environment = clean_environment(TARN_URL=server.url, _TARN_COMPLETE=f"source_{shell}")
    done = subprocess.run(TARN, cwd=server.folder, env=environment, capture_output=True, text=True, check=True)

    assert "_TARN_COMPLETE" in done.stdout
