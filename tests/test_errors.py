"""The error tree and its closed list."""

import re

import pytest
from tarn.errors import DocumentInvalid, SchemaViolation, SnapshotConflict, TarnError, problem_types

CONTRACT = {
    "no-snapshots": 404, "snapshot-not-found": 404, "snapshot-gone": 410, "snapshot-conflict": 409,
    "precondition-failed": 412, "path-exists": 409, "invalid-path": 400, "manifest-invalid": 500,
    "codec-configured": 415, "codec-not-streamable": 415, "empty-body": 400, "range-missing": 409,
    "overlapping-blocks": 409, "schema-violation": 422, "invalid-format": 400, "component-mismatch": 409,
    "dataset-not-found": 404, "entity-not-found": 404, "statement-not-found": 404, "file-not-found": 404,
    "stage-not-found": 404, "upload-not-found": 404, "mapping-not-found": 404, "job-not-found": 404,
    "ref-not-found": 404, "tag-not-found": 404, "queue-item-not-found": 404, "tenant-not-found": 404,
    "key-not-found": 404, "grant-not-found": 404, "export-missing": 404, "stage-closed": 409, "locked": 409,
    "lock-lost": 409, "idempotency-mismatch": 422, "quota-exceeded": 429, "rate-limited": 429, "backpressure": 429,
    "body-too-large": 413, "unauthenticated": 401, "forbidden": 403, "storage-full": 507, "unavailable": 503,
}  # fmt: skip
ADDITIONAL = {
    "already-exists", "body-timeout", "document-invalid", "internal", "job-conflict", "lock-not-found",
    "method-not-allowed", "not-acceptable", "problem-not-found", "query-timeout", "queue-item-conflict",
    "queue-item-failed", "range-not-satisfiable", "route-not-found", "source-failed", "unsupported-media-type",
    "version-not-found", "webhook-not-found",
}  # fmt: skip


def test_list_is_the_contracts_and_what_http_itself_needs():
    found = {slug: kind.status for slug, kind in problem_types().items()}

    assert {slug: status for slug, status in found.items() if slug not in ADDITIONAL} == CONTRACT
    assert found.keys() >= ADDITIONAL


def test_what_may_help_when_tried_again_is_io_conflicts_and_limits():
    assert {slug for slug, kind in problem_types().items() if kind.retryable} == {
        "snapshot-conflict", "quota-exceeded", "rate-limited", "backpressure", "source-failed", "unavailable",
        "body-timeout",
    }  # fmt: skip


@pytest.mark.parametrize("kind", problem_types().values())
def test_every_problem_has_a_slug_a_title_and_a_schema_that_fixes_them(kind: type[TarnError]):
    schema = kind.model().model_json_schema()

    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", kind.slug)
    assert kind.title()
    assert schema["properties"]["type"]["const"] == f"/problems/{kind.slug}"
    assert schema["properties"]["status"]["const"] == kind.status
    assert set(kind.member_types()) <= set(schema["required"])


@pytest.mark.parametrize("kind", problem_types().values())
def test_title_is_the_first_sentence_whole(kind: type[TarnError]):
    title = kind.title()

    assert kind.__doc__ is not None
    assert kind.__doc__.startswith(f"{title}.")
    assert title.count("`") % 2 == 0
    assert not re.search(r"\.\s", title)


def test_title_is_not_cut_at_a_dot_inside_a_word():
    assert DocumentInvalid.title() == "A stored document, such as a `config.yml` edited by hand, cannot be read"


@pytest.mark.parametrize("kind", [kind for kind in problem_types().values() if kind.status in (429, 503)])
def test_limit_and_outage_always_say_when_to_try_again(kind: type[TarnError]):
    assert kind("no").retry_after
    assert kind("no", retry_after=7).retry_after == 7


def test_members_are_in_the_problem():
    problem = SnapshotConflict("somebody was first", expected="a", head="b").problem("/v1/x")

    assert problem.model_dump()["head"] == "b"
    assert problem.title == "Another writer committed first"


def test_member_that_the_class_does_not_have_is_a_mistake():
    with pytest.raises(TypeError, match="has no member head"):
        SchemaViolation("no", errors=[], head="b")
