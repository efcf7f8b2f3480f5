"""Tags, queue and locks from the command line."""

import json

import pytest

from tests.cli.conftest import Tarn


@pytest.fixture
def other(tarn: Tarn, dataset: str) -> tuple[Tarn, str]:
    """Create another tenant that may read the dataset; return its command and its name."""
    name = f"{dataset}-other"
    tarn("tenants", "create", name)
    tarn("grants", "add", name, dataset, "read")
    return Tarn(tarn.url, tarn("keys", "create", name, "--quiet").stdout.strip()), name


def test_tag_is_set_shown_compared_and_deleted(tarn: Tarn, dataset: str):
    tarn("tags", "set", dataset, "a/old", "--at", "2020-01-01T00:00:00Z")
    tag = tarn.json("tags", "set", dataset, "a/new", "--value", '{"pages": 1}')

    assert tarn.json("tags", "get", dataset, "a/new") == tag
    assert [each["key"] for each in tarn.json("tags", "list", dataset, "--prefix", "a/")] == ["a/new", "a/old"]
    assert tarn.json("tags", "is-latest", dataset, "a/new", "a/old")["latest"] is True
    assert "a/new" in tarn("tags", "is-latest", dataset, "a/old", "a/new", code=1).stdout
    tarn("tags", "delete", dataset, "a/new")
    assert "there is no tag" in tarn("tags", "get", dataset, "a/new", code=1).output
    assert "not JSON" in tarn("tags", "set", dataset, "a", "--value", "{", code=2).output
    assert "can only be written by the lake" in tarn("tags", "set", dataset, "lakehouse/x", code=1).output


def test_queue_item_is_added_popped_acknowledged_and_deleted(tarn: Tarn, dataset: str, other: tuple[Tarn, str]):
    consumer, name = other
    item = tarn(
        "queue", "add", dataset, "upsert", "entity", "-", "--to", name, "--quiet", stdin='{"id": 1}'
    ).stdout.strip()

    assert [each["id"] for each in consumer.json("queue", "list", dataset)] == [item]
    popped = consumer.json("queue", "pop", dataset, "--lease", "600")
    assert (popped["id"], popped["payload"]) == (item, {"id": 1})
    assert "there is no item to take" in consumer("queue", "pop", dataset, code=1).output
    failed = consumer.json("queue", "ack", dataset, item, popped["token"], "--error", "out of ink")
    assert failed["problem"]["detail"] == "out of ink"
    assert "only a dead item" in tarn("queue", "retry", dataset, item, code=1).output
    assert tarn.json("queue", "show", dataset, item)["attempts"] == 1
    tarn("queue", "delete", dataset, item)
    assert consumer.json("queue", "list", dataset) == []
    assert "not JSON" in tarn("queue", "add", dataset, "delete", "entity", "x", code=2).output


def test_shared_items_of_another_tenant_are_listed(tarn: Tarn, dataset: str, other: tuple[Tarn, str]):
    reader, _ = other
    shared = [
        tarn(
            "queue", "add", dataset, "delete", "entity", json.dumps({"id": name}), "--shared", "--quiet"
        ).stdout.strip()
        for name in ("a", "b")
    ]

    listed = reader.json("queue", "list", dataset, "--from", "admin", "--after", shared[0])
    assert [each["id"] for each in listed] == shared[1:]


def test_lock_is_taken_refreshed_released_and_forced(tarn: Tarn, dataset: str, other: tuple[Tarn, str]):
    holder, name = other
    token = holder("locks", "take", dataset, "nightly", "--holder", "one", "--quiet").stdout.strip()

    assert "is held" in holder("locks", "take", dataset, "nightly", code=1).output
    assert holder.json("locks", "refresh", dataset, "nightly", token, "--ttl", "600")["fence"] == 1
    (listed,) = holder.json("locks", "list", dataset)
    assert listed["holder"] == "one"
    holder("locks", "release", dataset, "nightly", token)
    holder("locks", "take", dataset, "nightly")
    (held,) = [each for each in tarn.json("locks", "all") if each["tenant"] == name]
    assert tarn.json("locks", "force", held["id"])["fence"] == 2
    assert holder.json("locks", "list", dataset) == []
    assert holder("locks", "all", code=1).exit_code == 1
