"""Datasets, their versions, jobs and the catalog from the command line."""

from pathlib import Path

import yaml

from tests.cli.conftest import Tarn
from tests.server import Server


def test_dataset_is_created_from_a_file_assignments_and_options(tarn: Tarn, name: str, tmp_path: Path):
    config = tmp_path / "config.yml"
    config.write_text("title: From the file\ncategory: money\npublisher: {name: Parliament, country: no}\n")

    created = tarn.json(
        *("datasets", "create", name, "--file", str(config), "--title", "Donations"),
        *("--set", "tags=[money, power]", "--set", "publisher.url=https://example.org/"),
    )

    assert (created["name"], created["title"], created["category"]) == (name, "Donations", "money")
    assert created["tags"] == ["money", "power"]
    assert (created["publisher"]["name"], created["publisher"]["country"]) == ("Parliament", "no")
    assert created["publisher"]["url"] == "https://example.org/"
    assert tarn.json("datasets", "show", name) == created


def test_dataset_is_listed(tarn: Tarn, dataset: str):
    lines = [line.split() for line in tarn("datasets", "list").stdout.splitlines()]

    assert lines[0] == ["name", "title", "created"]
    assert [dataset, "Donations"] in [line[:2] for line in lines]


def test_shown_document_can_be_used_to_create_another_dataset(tarn: Tarn, dataset: str):
    document = tarn("datasets", "show", dataset, "--json").stdout

    copied = tarn.json("datasets", "create", f"{dataset}_copy", "--file", "-", stdin=document)

    assert (copied["name"], copied["title"]) == (f"{dataset}_copy", "Donations")


def test_change_of_a_nested_field_keeps_its_siblings(tarn: Tarn, dataset: str):
    tarn("datasets", "update", dataset, "--set", "policy.retention.count=5", "--set", "policy.maintain=false")

    changed = tarn.json("datasets", "update", dataset, "--set", "policy.retention.days=30")

    assert changed["policy"]["retention"] == {"count": 5, "days": 30}
    assert changed["policy"]["maintain"] is False
    assert changed["title"] == "Donations"


def test_null_restores_the_default(tarn: Tarn, dataset: str):
    assert tarn.json("datasets", "update", dataset, "--set", "title=")["title"] is None


def test_update_without_a_change_is_misuse(tarn: Tarn, dataset: str):
    assert "nothing to change" in tarn("datasets", "update", dataset, code=2).stderr


def test_missing_file_is_misuse(tarn: Tarn, dataset: str):
    tarn("datasets", "update", dataset, "--file", "no-such-file.yml", code=2)


def test_update_with_a_stale_entity_tag_fails_and_quotes_are_optional(tarn: Tarn, dataset: str):
    tag = tarn("datasets", "show", dataset, "--etag").stdout.strip()

    changed = tarn.json("datasets", "update", dataset, "--title", "B", "--if-match", tag.strip('"'))
    stale = tarn("datasets", "update", dataset, "--title", "C", "--if-match", tag, code=1)
    nested = tarn("datasets", "update", dataset, "--set", "policy.maintain=false", "--if-match", tag, code=1)

    assert changed["title"] == "B"
    assert "(precondition-failed)" in stale.stderr
    assert "(precondition-failed)" in nested.stderr
    assert tarn.json("datasets", "show", dataset) == changed


def test_entity_tag_is_the_last_line_of_the_shown_configuration(tarn: Tarn, dataset: str):
    tag = tarn("datasets", "show", dataset, "--etag").stdout.strip()
    lines = [line.split(maxsplit=1) for line in tarn("datasets", "show", dataset).stdout.splitlines()]

    assert lines[0] == ["name", dataset]
    assert lines[-1] == ["etag", tag]


def test_former_version_is_listed_printed_unchanged_and_restored(tarn: Tarn, dataset: str):
    tarn("datasets", "update", dataset, "--title", "B")
    [former] = [entry for entry in tarn.json("datasets", "versions", dataset) if entry["name"] == "config.yml"]

    document = tarn("datasets", "version", dataset, former["timestamp"], "config.yml").stdout
    restored = tarn.json("datasets", "update", dataset, "--file", "-", stdin=document)

    assert former["timestamp"] in tarn("datasets", "versions", dataset).stdout
    assert len(document.encode()) == former["size"]
    assert yaml.safe_load(document)["title"] == "Donations"
    assert restored["title"] == "Donations"


def test_name_of_a_deleted_dataset_is_free_when_the_command_returns(tarn: Tarn, dataset: str):
    job = tarn.json("datasets", "delete", dataset, "--yes")
    again = tarn.json("datasets", "create", dataset)

    assert (job["operation"], job["state"], job["dataset"]) == ("delete", "done", dataset)
    assert again["title"] is None


def test_delete_without_waiting_returns_a_job_that_can_be_waited_for(tarn: Tarn, dataset: str):
    started = tarn.json("datasets", "delete", dataset, "--yes", "--no-wait")
    done = tarn.json("jobs", "show", started["id"], "--wait", "60")
    listed = tarn("jobs", "list", "--limit", "1000").stdout

    assert started["id"] == done["id"]
    assert done["state"] == "done"
    assert started["id"] in listed
    assert len(tarn.json("jobs", "list", "--limit", "1")) == 1


def test_delete_without_a_terminal_is_refused_without_yes(tarn: Tarn, dataset: str):
    assert "--yes" in tarn("datasets", "delete", dataset, code=2).stderr
    assert tarn.json("datasets", "show", dataset)["name"] == dataset


def test_tenant_may_create_only_datasets_that_its_grant_matches(tarn: Tarn, server: Server, tenant: str):
    tarn("grants", "add", tenant, f"{tenant}_*", "admin")
    caller = Tarn(server.url, tarn("keys", "create", tenant, "-q").stdout.strip())

    caller("datasets", "create", f"{tenant}_own")
    refused = caller("datasets", "create", "others", code=1)

    assert refused.stderr == "tarn: this requires admin on 'others' (forbidden)\n"
    assert [entry["name"] for entry in caller.json("datasets", "list")] == [f"{tenant}_own"]


def test_catalog_without_a_subcommand_shows_the_catalog(tarn: Tarn, dataset: str):
    shown = tarn("catalog")

    assert [dataset, "Donations"] in [line.split() for line in shown.stdout.splitlines()]
    assert tarn.json("catalog") == tarn.json("catalog", "show")
    assert dataset in [entry["name"] for entry in tarn.json("catalog")["datasets"]]


def test_catalog_is_changed_field_by_field(tarn: Tarn):
    tarn("catalog", "update", "--title", "Our lake", "--set", "publisher.name=Us", "--set", "publisher.country=de")

    changed = tarn.json("catalog", "update", "--set", "publisher.name=You")

    assert changed["title"] == "Our lake"
    assert (changed["publisher"]["name"], changed["publisher"]["country"]) == ("You", "de")
    assert ["title", "Our lake"] in [line.split(maxsplit=1) for line in tarn("catalog").stdout.splitlines()]
