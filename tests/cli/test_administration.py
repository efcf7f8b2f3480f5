"""Tenants, keys, grants and the audit log from the command line."""

import json
from datetime import UTC, datetime, timedelta
from typing import get_args

import pytest
from tarn.cli.commands.administration.grants import LevelName
from tarn.model.tenant import Level

from tests.cli.conftest import Tarn
from tests.server import Server


def test_whoami_shows_the_caller(tarn: Tarn):
    lines = [line.split(maxsplit=1) for line in tarn("whoami").stdout.splitlines()]

    assert lines[:3] == [["tenant", "admin"], ["key", "bootstrap"], ["grants", "admin on *"]]
    assert tarn.json("whoami")["grants"] == [{"dataset": "*", "level": "admin"}]


def test_tenant_is_created_shown_changed_and_deleted(tarn: Tarn, name: str):
    created = tarn.json("tenants", "create", name, "--title", "First")
    shown = tarn.json("tenants", "show", name)
    disabled = tarn.json("tenants", "update", name, "--title", "Second", "--disable")
    enabled = tarn.json("tenants", "update", name, "--enable")
    deleted = tarn("tenants", "delete", name, "--yes")
    gone = tarn("tenants", "show", name, code=1)

    assert (created["title"], created["disabled"]) == ("First", False)
    assert shown == created
    assert (disabled["title"], disabled["disabled"]) == ("Second", True)
    assert (enabled["title"], enabled["disabled"]) == ("Second", False)
    assert (deleted.stdout, deleted.stderr) == ("", f"the tenant {name} is deleted\n")
    assert (gone.stdout, gone.stderr) == ("", f"tarn: there is no tenant '{name}' (tenant-not-found)\n")


def test_tenants_are_listed_as_a_table_and_as_json(tarn: Tarn, tenant: str):
    lines = tarn("tenants", "list").stdout.splitlines()
    listed = tarn.json("tenants", "list")

    assert lines[0].split() == ["name", "title", "disabled", "created"]
    assert [line.split()[0] for line in lines[1:]] == [entry["name"] for entry in listed]
    assert tenant in [entry["name"] for entry in listed]


def test_update_without_a_change_is_misuse(tarn: Tarn, tenant: str):
    assert "nothing to change" in tarn("tenants", "update", tenant, code=2).stderr


def test_delete_without_a_terminal_is_refused_without_yes_and_deletes_nothing(tarn: Tarn, tenant: str):
    refused = tarn("tenants", "delete", tenant, code=2, stdin="y\n")

    assert (refused.stdout, refused.stderr) == (
        "",
        "tarn: standard input is not a terminal: give --yes to delete without confirmation\n",
    )
    assert tarn.json("tenants", "show", tenant)["name"] == tenant


def test_set_limits_replace_all_former_ones(tarn: Tarn, tenant: str):
    before = tarn.json("tenants", "limits", tenant)

    first = tarn.json("tenants", "limits", tenant, "--rate-limit", "50", "--rate-burst", "7", "--statements", "9")
    second = tarn.json("tenants", "limits", tenant, "--bytes", "0")
    shown = tarn.json("tenants", "limits", tenant)
    cleared = tarn.json("tenants", "limits", tenant, "--defaults")

    assert (first["rate_limit"], first["rate_burst"], first["quota_statements"]) == (50, 7, 9)
    assert second == before | {"quota_bytes": 0}
    assert shown == second
    assert cleared == before


def test_missing_quota_is_shown_as_none(tarn: Tarn, tenant: str):
    assert ["quota_bytes", "none"] in [line.split() for line in tarn("tenants", "limits", tenant).stdout.splitlines()]


def test_defaults_together_with_a_limit_is_misuse(tarn: Tarn, tenant: str):
    assert "--defaults" in tarn("tenants", "limits", tenant, "--defaults", "--bytes", "1", code=2).stderr


def test_quiet_prints_only_the_key(tarn: Tarn, server: Server, tenant: str):
    printed = tarn("keys", "create", tenant, "--quiet")

    assert printed.stderr == ""
    assert printed.stdout.count("\n") == 1
    assert Tarn(server.url, printed.stdout.strip()).json("whoami")["tenant"] == tenant


def test_key_is_shown_once_listed_without_its_secret_and_revoked(tarn: Tarn, tenant: str):
    created = dict(
        line.split(maxsplit=1) for line in tarn("keys", "create", tenant, "--label", "ci").stdout.splitlines()
    )
    listed = tarn("keys", "list", tenant).stdout
    revoked = tarn.json("keys", "revoke", created["id"])
    refused = Tarn(tarn.url, created["key"])("whoami", code=1)

    assert created["label"] == "ci"
    assert created["id"] in listed
    assert created["key"] not in listed
    assert revoked["revoked"] is not None
    assert "(unauthenticated)" in refused.stderr


@pytest.mark.parametrize(
    ("given", "expires"),
    [
        ("2130-01-31", "2130-01-31T00:00:00Z"),
        ("2130-01-31T12:00", "2130-01-31T12:00:00Z"),
        ("2130-01-31T12:00+01:00", "2130-01-31T11:00:00Z"),
    ],
)
def test_expiry_without_an_offset_is_in_utc(tarn: Tarn, tenant: str, given: str, expires: str):
    created = tarn.json("keys", "create", tenant, "--expires", given)

    assert datetime.fromisoformat(created["expires"]) == datetime.fromisoformat(expires)


@pytest.mark.parametrize(
    ("given", "span"), [("12h", timedelta(hours=12)), ("30d", timedelta(days=30)), ("8w", timedelta(weeks=8))]
)
def test_expiry_may_be_a_duration_from_now(tarn: Tarn, tenant: str, given: str, span: timedelta):
    before = datetime.now(UTC)
    expires = datetime.fromisoformat(tarn.json("keys", "create", tenant, "--expires", given)["expires"])
    after = datetime.now(UTC)

    assert before + span <= expires <= after + span


@pytest.mark.parametrize("given", ["soon", "30", "30y", "-1d", "99999999999w", ""])
def test_invalid_expiry_is_misuse_and_creates_no_key(tarn: Tarn, tenant: str, given: str):
    tarn("keys", "create", tenant, "--expires", given, code=2)

    assert tarn.json("keys", "list", tenant) == []


def test_quiet_together_with_json_is_misuse_and_creates_no_key(tarn: Tarn, tenant: str):
    tarn("keys", "create", tenant, "--quiet", "--json", code=2)

    assert tarn.json("keys", "list", tenant) == []


def test_grant_is_added_listed_and_removed(tarn: Tarn, tenant: str):
    added = tarn.json("grants", "add", tenant, "leaks_*", "write")
    listed = tarn.json("grants", "list", tenant)
    removed = tarn("grants", "remove", added["id"])
    remaining = tarn.json("grants", "list", tenant)

    assert (added["dataset"], added["level"]) == ("leaks_*", "write")
    assert listed == [added]
    assert removed.stdout == ""
    assert remaining == []


def test_grant_levels_are_those_of_the_model():
    assert get_args(LevelName) == tuple(Level)


def test_unknown_level_is_misuse(tarn: Tarn, tenant: str):
    assert "maintain" in tarn("grants", "add", tenant, "*", "everything", code=2).stderr


def test_audit_lists_newest_entries_first_with_filters_and_a_limit(tarn: Tarn, server: Server, tenant: str):
    caller = Tarn(server.url, tarn("keys", "create", tenant, "-q").stdout.strip())
    caller("tenants", "list", code=1)
    caller("audit", code=1)

    entries = tarn.json("audit", "--tenant", tenant)
    newest = tarn.json("audit", "--tenant", tenant, "--limit", "1")
    filters = ("--key-id", entries[0]["key"], "--denied", "--action", "list_tenants", "--since", entries[-1]["at"])
    listed = tarn.json("audit", *filters, "--request", entries[-1]["request"])
    done = tarn.json("audit", "--tenant", tenant, "--done")

    assert [(entry["action"], entry["outcome"]) for entry in entries] == [
        ("list_audit", "denied"),
        ("list_tenants", "denied"),
    ]
    assert newest == entries[:1]
    assert (listed, done) == (entries[1:], [])


def test_problem_lists_each_error_with_its_field(tarn: Tarn):
    refused = tarn("tenants", "create", "Not A Name", "--title", "\x07", code=1)

    first, *errors = refused.stderr.splitlines()
    assert first.startswith("tarn: ")
    assert first.endswith("(schema-violation)")
    assert [error.split(":")[0] for error in errors] == ["    name", "    title"]


def test_problem_is_json_on_standard_error_with_the_option_json(tarn: Tarn):
    refused = tarn("tenants", "show", "nobody", "--json", code=1)

    assert refused.stdout == ""
    assert json.loads(refused.stderr)["type"] == "/problems/tenant-not-found"
