"""Events and webhooks from the command line."""

import json

from tarn_client.events import parse_events

from tests.cli.conftest import Tarn

URL = "https://192.0.2.1/hook"


def test_events_of_a_dataset_are_printed_one_per_line(tarn: Tarn, dataset: str, tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    tarn("files", "put", dataset, str(tmp_path / "a.txt"))
    command = ["events", dataset, "--since", "0", "--limit", "2"]

    lines = tarn(*command).stdout.splitlines()
    documents = [json.loads(line) for line in tarn(*command, "--json").stdout.splitlines()]
    filtered = tarn("events", dataset, "--since", "0", "--limit", "1", "--kind", "files.put").stdout

    assert [line.split()[1:3] for line in lines] == [["1", "dataset.created"], ["2", "files.put"]]
    assert "count=1" in lines[1]
    assert [event["kind"] for event in documents] == ["dataset.created", "files.put"]
    assert filtered == f"{lines[1]}\n"


def test_events_of_a_missing_dataset_are_a_problem(tarn: Tarn):
    assert "(dataset-not-found)" in tarn("events", "nothing", code=1).stderr


def test_job_is_followed_to_its_end(tarn: Tarn, dataset: str):
    job = tarn.json("datasets", "delete", dataset, "--yes")["id"]

    lines = [line.split()[2] for line in tarn("jobs", "follow", job).stdout.splitlines()]

    assert (lines[0], lines[-1]) == ("job.queued", "job.done")


def test_events_are_parsed_independent_of_how_the_stream_is_chunked():
    complete = b'id: 8\nevent: x\ndata: {"id": 8}\n\nid: 9\nevent: x\ndata: {"id": 9}\n\n'
    stream = b"retry: 2000\n\n:\nid: 7\n\n" + complete + b'id: 10\ndata: {"i'

    pieces = [stream[start : start + 3] for start in range(0, len(stream), 3)]

    assert list(parse_events(pieces)) == [{"id": 8}, {"id": 9}]


def test_webhook_is_set_shown_and_removed(tarn: Tarn, tenant: str, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("a secret of some length\n")
    refused = tarn("webhooks", "set", tenant, URL, "--secret-file", str(secret), code=1)
    created = tarn.json("webhooks", "set", tenant, "https://hooks.invalid/tarn", "--secret-file", str(secret))
    changed = tarn.json(
        "webhooks", "set", tenant, "https://hooks.invalid/2", "--kind", "export.made", "--dataset", "leaks_*"
    )
    shown = tarn("webhooks", "show", tenant).stdout
    removed = tarn("webhooks", "remove", tenant, "--yes")

    assert "is not at a public address" in refused.stderr
    assert (created["state"], created["datasets"]) == ("active", ["*"])
    assert (changed["kinds"], changed["datasets"], changed["id"]) == (["export.made"], ["leaks_*"], created["id"])
    assert "https://hooks.invalid/2" in shown
    assert "a secret" not in shown
    assert (removed.stdout, removed.stderr) == ("", f"the webhook of {tenant} is removed\n")
    assert "(webhook-not-found)" in tarn("webhooks", "show", tenant, code=1).stderr


def test_secret_is_read_from_standard_input(tarn: Tarn, tenant: str):
    secret = "sixteen letters or more\n"

    result = tarn("webhooks", "set", tenant, "https://hooks.invalid/tarn", "--secret-file", "-", stdin=secret)

    assert "hooks.invalid" in result.stdout


def test_unreadable_secret_file_is_misuse(tarn: Tarn, tenant: str, tmp_path):
    missing = str(tmp_path / "missing")

    assert "cannot be read" in tarn("webhooks", "set", tenant, URL, "--secret-file", missing, code=2).stderr
