"""The level that every route requires, and a valid request to it: one line per route.

A route of the OpenAPI document without a line here fails `test_matrix.py`, and so does a line without a route.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from tests.isolation.prepared_lake import ENTITY_MAPPING, OWNED, WEBHOOK


class Required(IntEnum):
    """What a route requires of its caller, in ascending order."""

    NOTHING = 0
    KEY = 1
    READ = 2
    WRITE = 3
    MAINTAIN = 4
    ADMIN = 5
    LAKE = 6


NOTHING, KEY, READ, WRITE, MAINTAIN, ADMIN, LAKE = Required


@dataclass(frozen=True)
class Route:
    """The level that a route requires, and a valid request to it.

    Strings may name resources in braces: `{stage}` is a stage of the caller, `{value}` is a secret value.
    """

    required: Required
    json: Any = None
    body: bytes | None = None
    content_type: str | None = None
    query: Mapping[str, str] = field(default_factory=dict)
    path: Mapping[str, str] = field(default_factory=dict)
    """Resources for parameters of the path that are not named like their resource."""
    required_elsewhere: Required | None = None
    """The level that the route requires on a dataset that is not in its path."""
    refused_status: int = 403
    """The status of the response to callers without that level."""
    foreign_status: Mapping[str, int] = field(default_factory=dict)
    """By parameter of the path: the status of the response to another tenant's id, if it is not 404."""

    def uses_any(self, resources: Collection[str]) -> bool:
        return any(f"{{{resource}}}" in f"{self.path}{self.json}" for resource in resources)


ENTITY_WITHOUT_ID = {"schema": "Person", "properties": {"name": ["{value}"]}}
ENTITY = ENTITY_WITHOUT_ID | {"id": "eve"}
STATEMENT = {"entity_id": "eve", "prop": "name", "value": "{value}", "schema": "Person", "dataset": "x", "id": ""}
OCTET_STREAM = "application/octet-stream"
FORM = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\n{value}\r\n--x--\r\n'
CSV_MAPPING = {"entities": {"eve": ENTITY_MAPPING}}
NEW_NAME = "put-{mark}"
EXPORT = {"name": "entities.ftm.json"}
DELTA = {"name": "{delta}.json"}
SNAPSHOT_PAIR = {"former": "{snapshot}", "latter": "{snapshot}"}
ALL_DATASETS = {"datasets": ["*"]}
NAME_CONDITION = {"field": "prop:name", "op": "eq", "value": "{value}"}
QUEUE_ITEM = {"action": "UPSERT", "resource": "entity", "payload": ENTITY}
COUNT = {"metrics": ["count"], "group_by": ["schema"]}

ROUTES: dict[str, Route] = {
    # system
    "health": Route(NOTHING),
    "ready": Route(NOTHING),
    "metrics": Route(NOTHING),
    "get_problem": Route(NOTHING),
    "whoami": Route(KEY),
    # catalog and datasets
    "get_catalog": Route(KEY),
    "get_catalog_json": Route(KEY),
    "update_catalog": Route(LAKE, {"title": "{value}"}),
    "list_datasets": Route(KEY),
    "create_dataset": Route(KEY, {"name": "{new_name}", "summary": "{value}"}, required_elsewhere=ADMIN),
    "get_dataset": Route(READ),
    "update_dataset": Route(ADMIN, {"title": "{value}"}),
    "delete_dataset": Route(ADMIN, path={"dataset": "{disposable_dataset}"}, query={"confirm": "{disposable_dataset}"}),
    "list_versions": Route(READ),
    "get_version": Route(READ, path={"timestamp": "{version}", "name": "config.yml"}),
    "list_exports": Route(READ),
    "get_delta_index": Route(READ),
    "head_delta_index": Route(READ),
    "get_export": Route(READ, path=EXPORT),
    "head_export": Route(READ, path=EXPORT),
    "get_export_delta": Route(READ, path=DELTA),
    "head_export_delta": Route(READ, path=DELTA),
    "get_freshness": Route(READ),
    # entities and statements
    "add_entities": Route(WRITE, ENTITY),
    "put_entity": Route(
        WRITE, ENTITY_WITHOUT_ID, query={"origin": "o"}, path={"entity": NEW_NAME}, foreign_status={"entity": 200}
    ),
    "delete_entity": Route(WRITE, path={"entity": "bob-{mark}"}, foreign_status={"entity": 200}),
    "add_statements": Route(WRITE, STATEMENT),
    "delete_statement": Route(WRITE, foreign_status={"statement": 200}),
    "delete_origin": Route(WRITE, path={"name": "some"}),
    "get_entity": Route(READ),
    "list_entities": Route(READ),
    "stream_entities": Route(READ),
    "list_invalid_entities": Route(READ),
    "query_entities": Route(READ, {"where": NAME_CONDITION}),
    "aggregate_entities": Route(READ, COUNT),
    "list_adjacent": Route(READ),
    "query_datasets": Route(KEY, ALL_DATASETS),
    "aggregate_datasets": Route(KEY, ALL_DATASETS | COUNT),
    "list_statements": Route(READ),
    "stream_statements": Route(READ),
    # stages
    "create_stage": Route(WRITE, {"message": "{value}"}),
    "list_stages": Route(WRITE),
    "get_stage": Route(WRITE, path={"stage": "{stage}"}),
    "stage_entities": Route(WRITE, ENTITY),
    "stage_statements": Route(WRITE, STATEMENT),
    "commit_stage": Route(WRITE, path={"stage": "{filled_stage}"}),
    "commit_stages": Route(WRITE, {"stages": ["{filled_stage}"]}),
    "abort_stage": Route(WRITE, path={"stage": "{stage}"}),
    # files
    "put_file": Route(WRITE, body=b"{value}", content_type=OCTET_STREAM, query={"path": "{file_path}"}),
    "post_file": Route(WRITE, body=FORM, content_type="multipart/form-data; boundary=x", query={"path": "{file_path}"}),
    "fetch_file": Route(WRITE, {"uri": "{sources}/file.txt", "path": "{file_path}"}),
    "list_files": Route(READ),
    "list_file_records": Route(READ),
    "get_file": Route(READ),
    "delete_file": Route(WRITE),
    "get_file_data": Route(READ),
    "head_file_data": Route(READ),
    "put_file_text": Route(WRITE, body=b"{value}", content_type=OCTET_STREAM, path={"origin": "{text_origin}"}),
    "get_file_text": Route(READ, path={"origin": "{text_origin}"}),
    "delete_file_text": Route(WRITE, path={"origin": "{text_origin}"}),
    "add_file_entity": Route(WRITE),
    "create_upload": Route(WRITE, {"length": 4, "path": "a.txt", "meta": {"note": "{value}"}}),
    "get_upload": Route(WRITE, path={"upload": "{upload}"}),
    "put_upload_block": Route(WRITE, body=b"abcd", content_type=OCTET_STREAM, query={"offset": "0"}),
    "commit_upload": Route(WRITE, path={"upload": "{filled_upload}"}),
    "delete_upload": Route(WRITE, path={"upload": "{upload}"}),
    # mappings
    "list_mappings": Route(READ),
    "get_mapping": Route(READ),
    "put_mapping": Route(WRITE, CSV_MAPPING, foreign_status={"content_hash": 201}),
    "list_mapping_versions": Route(READ, foreign_status={"content_hash": 200}),
    "get_mapping_version": Route(READ, path={"timestamp": "{mapping_version}"}),
    "process_mapping": Route(WRITE),
    # snapshots
    "list_snapshots": Route(READ),
    "get_snapshot": Route(READ),
    "list_snapshot_files": Route(READ),
    "diff_snapshots": Route(READ, path=SNAPSHOT_PAIR),
    "stream_diff": Route(READ, path=SNAPSHOT_PAIR),
    "list_refs": Route(READ),
    "get_ref": Route(READ),
    "set_ref": Route(MAINTAIN, {"snapshot": "{snapshot}"}, path={"ref": NEW_NAME}, foreign_status={"ref": 200}),
    "delete_ref": Route(MAINTAIN),
    # the journal
    "get_journal": Route(READ),
    "list_rejected": Route(MAINTAIN),
    "retry_rejected": Route(MAINTAIN),
    # operations and jobs
    "flush_dataset": Route(MAINTAIN),
    "compact_dataset": Route(MAINTAIN),
    "optimize_dataset": Route(MAINTAIN),
    "vacuum_dataset": Route(MAINTAIN),
    "verify_dataset": Route(MAINTAIN),
    "revert_dataset": Route(MAINTAIN, {"to": "{snapshot}", "message": "{value}"}),
    "purge_dataset": Route(ADMIN, {"entity_ids": ["{entity}"], "confirm": True}),
    "export_dataset": Route(MAINTAIN, {"kinds": ["entities"]}),
    "make_dataset": Route(MAINTAIN),
    "crawl_dataset": Route(MAINTAIN, {"uri": "{sources}/"}),
    "flush_datasets": Route(KEY),
    "list_jobs": Route(KEY),
    "get_job": Route(KEY, path={"job": "{job}"}),
    "retry_job": Route(KEY, path={"job": "{cancelled_job}"}, required_elsewhere=MAINTAIN, refused_status=404),
    "cancel_job": Route(KEY, path={"job": "{job}"}),
    # events
    "follow_dataset": Route(READ, query={"since": "0"}),
    "follow_job": Route(KEY, path={"job": "{cancelled_job}"}),
    # tags, queue, locks
    "list_tags": Route(READ),
    "get_tag": Route(READ, query={"key": "{tag}"}),
    "set_tag": Route(READ, {"value": "{value}"}, query={"key": "{tag_key}"}),
    "delete_tag": Route(READ, query={"key": "{tag}"}),
    "is_latest_tag": Route(READ, query={"key": "{tag}", "dep": "{tag}"}),
    "add_queue_item": Route(READ, QUEUE_ITEM | {"to": "{tenant}"}),
    "list_queue": Route(READ),
    "pop_queue_item": Route(READ, {}),
    "get_queue_item": Route(READ, path={"item": "{item}"}),
    "ack_queue_item": Route(READ, {"token": "{item_token}"}, path={"item": "{popped_item}"}),
    "retry_queue_item": Route(READ, path={"item": "{dead_item}"}),
    "delete_queue_item": Route(READ, path={"item": "{item}"}),
    "list_locks": Route(READ),
    "take_lock": Route(READ, {"ttl": 60}, path={"lock": "{lock_name}"}, foreign_status={"lock": 200}),
    "release_lock": Route(READ, path={"lock": "{lock}"}, query={"token": "{lock_token}"}, foreign_status={"lock": 409}),
    # administration
    "get_worker": Route(LAKE),
    "list_tenants": Route(LAKE),
    "create_tenant": Route(LAKE, {"name": "{new_name}", "title": "{value}"}),
    "get_tenant": Route(LAKE),
    "update_tenant": Route(LAKE, {"title": "{value}"}, path={"tenant": "{disposable_tenant}"}),
    "delete_tenant": Route(LAKE, path={"tenant": "{disposable_tenant}"}),
    "list_keys": Route(LAKE),
    "create_key": Route(LAKE, {"label": "{value}"}, path={"tenant": "{disposable_tenant}"}),
    "revoke_key": Route(LAKE),
    "list_grants": Route(LAKE),
    "create_grant": Route(LAKE, {"dataset": "{new_name}", "level": "read"}, path={"tenant": "{disposable_tenant}"}),
    "delete_grant": Route(LAKE),
    "get_limits": Route(LAKE),
    "set_limits": Route(LAKE, {}, path={"tenant": "{disposable_tenant}"}),
    "list_audit": Route(LAKE),
    "list_all_locks": Route(LAKE),
    "force_release_lock": Route(LAKE, path={"lock": "{lock_id}"}),
    "get_webhook": Route(LAKE, path={"tenant": "{webhook_tenant}"}),
    "set_webhook": Route(LAKE, WEBHOOK, path={"tenant": "{disposable_tenant}"}),
    "delete_webhook": Route(LAKE, path={"tenant": "{webhook_tenant}"}),
}

NOT_RESOURCES = ("dataset", "tenant", "slug", "name", "origin")
"""Parameters of paths that are not ids of a tenant's resources. The dataset has a test of its own."""

FOREIGN_QUERY_PARAMETERS: dict[str, list[tuple[str, set[int]]]] = {
    "at": [("{snapshot}", {400, 404}), ("{ref}", {400, 404})],
    "id": [("{entity}", {200})],
    "canonical_id": [("{entity}", {200})],
    "origin": [("{origin}", {200, 201, 404})],
    "path": [("{file_path}", {200, 201})],
    "prefix": [("{file_path}", {200})],
    "checksum": [("{checksum}", {422})],
    "confirm": [("{dataset}", {422})],
    "tenant": [("{tenant}", {403})],
    "key": [("{tag}", {200, 204, 403, 404})],
    "dep": [("{tag}", {200})],
    "from": [("{tenant}", {200, 404})],
    "after": [("{item}", {200})],
    "token": [("{lock_token}", {409})],
}
"""By query parameter: resources of another tenant to send in it, and the allowed statuses of the response."""

FOREIGN_HEADERS: dict[str, list[tuple[str, set[int]]]] = {
    "if-match": [("{snapshot}", {412}), ("{etag}", {412})],
    "if-none-match": [("{etag}", {200, 201, 204, 412})],
    "idempotency-key": [(f"key-{OWNED}", {200, 201})],
}
"""By header: resources of another tenant to send in it, and the allowed statuses of the response."""

FOREIGN_BODIES: list[tuple[str, Any, set[int]]] = [
    ("create_dataset", {"name": "{dataset}"}, {403}),
    ("query_datasets", {"datasets": ["{dataset}"]}, {200}),
    ("query_datasets", {"datasets": ["*"], "where": {"field": "id", "op": "eq", "value": "{entity}"}}, {200}),
    ("query_datasets", {"datasets": ["*"], "cursor": "{entity_cursor}"}, {422}),
    ("aggregate_datasets", {"datasets": ["{dataset}"], **COUNT}, {200}),
    ("query_entities", {"cursor": "{entity_cursor}"}, {422}),
    ("query_entities", {"where": {"field": "origin", "op": "eq", "value": "{origin}"}}, {200}),
    ("commit_stages", {"stages": ["{filled_stage}"]}, {404}),
    ("set_ref", {"snapshot": "{snapshot}"}, {404}),
    ("set_ref", {"snapshot": "{ref}"}, {404, 422}),
    ("add_queue_item", QUEUE_ITEM | {"to": "{tenant}"}, {404, 422}),
    ("ack_queue_item", {"token": "{item_token}"}, {404, 409}),
    ("take_lock", {"ttl": 60, "token": "{lock_token}"}, {409}),
    ("retry_rejected", {"ids": ["{job}"]}, {200}),
    ("add_statements", STATEMENT | {"dataset": "{dataset}", "entity_id": "new-{mark}"}, {200}),
    ("fetch_file", {"uri": "{lake}/archive"}, {400, 403, 422}),
    ("crawl_dataset", {"uri": "{lake}"}, {400, 403, 422}),
]
"""By route: bodies with resources of another tenant, and the allowed statuses of the response."""
