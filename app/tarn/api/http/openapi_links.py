"""OpenAPI links: which operations can follow a response, for clients and for API test tools."""

from typing import Any, NamedTuple

DATASET = {"dataset": "$request.path.dataset"}
STAGE = {**DATASET, "stage": "$response.body#/id"}
UPLOAD = {**DATASET, "upload": "$response.body#/id"}
FILE = {**DATASET, "checksum": "$response.body#/checksum", "file": "$response.body#/id"}
CONTENT = {**DATASET, "checksum": "$response.body#/checksum"}
MAPPING = {**DATASET, "content_hash": "$request.path.content_hash"}
ENTITY = {**DATASET, "entity": "$request.path.entity"}
REF = {**DATASET, "ref": "$request.path.ref"}
SNAPSHOT = {**DATASET, "snapshot": "$response.body#/results/0/id"}
JOB = {"job": "$response.body#/id"}
TENANT = {"tenant": "$response.body#/name"}


class Link(NamedTuple):
    """A link from the response of one operation to others, and where those find their parameters."""

    source: str
    targets: tuple[str, ...]
    parameters: dict[str, str]


LINKS = (
    Link("create_dataset", ("get_dataset", "update_dataset", "list_versions"), {"dataset": "$response.body#/name"}),
    Link("put_entity", ("get_entity", "list_adjacent", "delete_entity"), ENTITY),
    Link("create_stage", ("get_stage", "stage_entities", "stage_statements", "commit_stage", "abort_stage"), STAGE),
    Link("create_upload", ("get_upload", "put_upload_block", "commit_upload", "delete_upload"), UPLOAD),
    Link("put_file", ("get_file", "add_file_entity", "delete_file"), FILE),
    Link("put_file", ("list_file_records", "get_file_data"), CONTENT),
    Link("put_mapping", ("get_mapping", "list_mapping_versions", "process_mapping"), MAPPING),
    Link("set_ref", ("get_ref", "delete_ref"), REF),
    Link("list_snapshots", ("get_snapshot", "list_snapshot_files"), SNAPSHOT),
    Link("flush_dataset", ("get_job", "cancel_job", "retry_job"), JOB),
    Link("compact_dataset", ("get_job", "cancel_job"), JOB),
    Link("export_dataset", ("get_job", "cancel_job"), JOB),
    Link("create_tenant", ("get_tenant", "update_tenant", "create_key", "create_grant", "delete_tenant"), TENANT),
    Link("create_key", ("revoke_key",), {"key": "$response.body#/id"}),
    Link("create_grant", ("delete_grant",), {"grant": "$response.body#/id"}),
)


def add_links(document: dict[str, Any]) -> None:
    """Add the links to the successful responses in an OpenAPI document."""
    operations = {op["operationId"]: op for path in document["paths"].values() for op in path.values()}
    for link in LINKS:
        for status, response in operations[link.source]["responses"].items():
            if status < "300":
                links = response.setdefault("links", {})
                for target in link.targets:
                    links[target] = {"operationId": operations[target]["operationId"], "parameters": link.parameters}
