"""The error classes and the closed list of problem types."""

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


def test_problem_types_are_those_of_the_contract_and_those_that_http_needs():
    statuses = {slug: kind.status for slug, kind in problem_types().items()}

    assert {slug: status for slug, status in statuses.items() if slug not in ADDITIONAL} == CONTRACT
    assert statuses.keys() >= ADDITIONAL


def test_retryable_problems_are_io_errors_conflicts_and_limits():
    assert {slug for slug, kind in problem_types().items() if kind.retryable} == {
        "snapshot-conflict", "quota-exceeded", "rate-limited", "backpressure", "source-failed", "unavailable",
        "body-timeout",
    }  # fmt: skip


@pytest.mark.parametrize("kind", problem_types().values())
def test_every_problem_has_slug_title_and_schema_with_constant_type_and_status(kind: type[TarnError]):
    schema = kind.model().model_json_schema()

    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", kind.slug)
    assert kind.title()
    assert schema["properties"]["type"]["const"] == f"/problems/{kind.slug}"
    assert schema["properties"]["status"]["const"] == kind.status
    assert set(kind.member_types()) <= set(schema["required"])


@pytest.mark.parametrize("kind", problem_types().values())
def test_title_is_the_whole_first_sentence_of_the_docstring(kind: type[TarnError]):
    title = kind.title()

    assert kind.__doc__ is not None
    assert kind.__doc__.startswith(f"{title}.")
    assert title.count("`") % 2 == 0
    assert not re.search(r"\.\s", title)


def test_title_is_not_cut_at_a_dot_inside_a_word():
    assert DocumentInvalid.title() == "A stored document, such as a `config.yml` edited by hand, cannot be parsed"


@pytest.mark.parametrize("kind", [kind for kind in problem_types().values() if kind.status in (429, 503)])
def test_limits_and_outages_always_have_retry_after(kind: type[TarnError]):
    assert kind("no").retry_after
    assert kind("no", retry_after=7).retry_after == 7


def test_members_are_part_of_the_problem():
    problem = SnapshotConflict("another writer committed first", expected="a", head="b").problem("/v1/x")

    assert problem.model_dump()["head"] == "b"
    assert problem.title == "Another writer committed first"


def test_unknown_member_is_a_type_error():
    with pytest.raises(TypeError, match="has no member head"):
        SchemaViolation("no", errors=[], head="b")
