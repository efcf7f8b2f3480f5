"""Completion: what the shell is told to offer."""

import subprocess

import pytest

from tests.cli.conftest import TARN
from tests.server import Server, clean_environment


def offered(server: Server, *words: str, **variables: str) -> list[str]:
    """What bash is offered for the last of these words."""
    asked = {"_TARN_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(["tarn", *words]), "COMP_CWORD": str(len(words))}
    environment = clean_environment(**{"TARN_URL": server.url, **variables}, **asked)
    done = subprocess.run(TARN, cwd=server.folder, env=environment, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(("words", "found"), [(("ent",), ["entities"]), (("entities", "ad"), ["adjacent"])])
def test_commands_are_completed(server: Server, words: tuple[str, ...], found: list[str]):
    assert offered(server, *words) == found


def test_names_of_datasets_are_completed_by_the_server(server: Server, dataset: str):
    assert offered(server, "entities", "get", dataset[:8]) == [dataset]
    assert offered(server, "load", "--dataset", dataset[:8]) == [dataset]
    assert offered(server, "flush", dataset[:8]) == [dataset]


def test_without_a_server_nothing_is_offered_and_nothing_is_said(server: Server):
    assert offered(server, "entities", "get", "d", TARN_URL="http://127.0.0.1:1") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_for_a_shell_is_printed(server: Server, shell: str):
    environment = clean_environment(TARN_URL=server.url, _TARN_COMPLETE=f"source_{shell}")
    done = subprocess.run(TARN, cwd=server.folder, env=environment, capture_output=True, text=True, check=True)

    assert "_TARN_COMPLETE" in done.stdout
