"""Events and webhooks from the command line."""

import json

from tarn_client.events import parse_events

from tests.cli.conftest import Tarn

URL = "https://192.0.2.1/hook"


def test_events_of_a_dataset_are_shown_a_line_each(tarn: Tarn, dataset: str, tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    tarn("files", "put", dataset, str(tmp_path / "a.txt"))
    both = ["events", dataset, "--since", "0", "--limit", "2"]

    people = tarn(*both).stdout.splitlines()
    programs = [json.loads(line) for line in tarn(*both, "--json").stdout.splitlines()]
    chosen = tarn("events", dataset, "--since", "0", "--limit", "1", "--kind", "files.put").stdout

    assert [line.split()[1:3] for line in people] == [["1", "dataset.created"], ["2", "files.put"]]
    assert "count=1" in people[1]
    assert [event["kind"] for event in programs] == ["dataset.created", "files.put"]
    assert chosen == f"{people[1]}\n"


def test_events_of_a_dataset_that_is_not_there_are_a_problem(tarn: Tarn):
    assert "(dataset-not-found)" in tarn("events", "nothing", code=1).stderr


def test_job_is_followed_to_its_end(tarn: Tarn, dataset: str):
    job = tarn.json("datasets", "delete", dataset, "--yes")["id"]

    lines = [line.split()[2] for line in tarn("jobs", "follow", job).stdout.splitlines()]

    assert (lines[0], lines[-1]) == ("job.queued", "job.done")


def test_events_are_told_from_pieces_of_a_stream_as_they_come():
    whole = b'id: 8\nevent: x\ndata: {"id": 8}\n\nid: 9\nevent: x\ndata: {"id": 9}\n\n'
    stream = b"retry: 2000\n\n:\nid: 7\n\n" + whole + b'id: 10\ndata: {"i'

    pieces = [stream[start : start + 3] for start in range(0, len(stream), 3)]

    assert list(parse_events(pieces)) == [{"id": 8}, {"id": 9}]


def test_webhook_is_set_shown_and_removed(tarn: Tarn, tenant: str, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("a secret of some length\n")
    refused = tarn("webhooks", "set", tenant, URL, "--secret-file", str(secret), code=1)
    made = tarn.json("webhooks", "set", tenant, "https://hooks.invalid/tarn", "--secret-file", str(secret))
    changed = tarn.json(
        "webhooks", "set", tenant, "https://hooks.invalid/2", "--kind", "export.made", "--dataset", "leaks_*"
    )
    shown = tarn("webhooks", "show", tenant).stdout
    removed = tarn("webhooks", "remove", tenant, "--yes")

    assert "is not at a public address" in refused.stderr
    assert (made["state"], made["datasets"]) == ("active", ["*"])
    assert (changed["kinds"], changed["datasets"], changed["id"]) == (["export.made"], ["leaks_*"], made["id"])
    assert "https://hooks.invalid/2" in shown
    assert "a secret" not in shown
    assert (removed.stdout, removed.stderr) == ("", f"the webhook of {tenant} is removed\n")
    assert "(webhook-not-found)" in tarn("webhooks", "show", tenant, code=1).stderr


def test_secret_may_come_from_standard_input(tarn: Tarn, tenant: str):
    secret = "sixteen letters or more\n"

    given = tarn("webhooks", "set", tenant, "https://hooks.invalid/tarn", "--secret-file", "-", stdin=secret)

    assert "hooks.invalid" in given.stdout


def test_secret_that_cannot_be_read_is_misuse(tarn: Tarn, tenant: str, tmp_path):
    missing = str(tmp_path / "missing")

    assert "cannot be read" in tarn("webhooks", "set", tenant, URL, "--secret-file", missing, code=2).stderr
