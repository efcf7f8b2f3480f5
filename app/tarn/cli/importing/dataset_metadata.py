"""Conversion of an ftm-lakehouse dataset's metadata and mappings to Tarn's."""

import os
from collections.abc import Iterator
from typing import Any

from tarn.cli.failures import Misuse
from tarn.cli.importing.layouts import DatasetDirectory

COMPRESSION = {"gz": "gzip", "zst": "zstd"}

SOURCE_FIELDS = frozenset(
    {"name", "id", "created", "uri", "storage", "shards", "resources", "stats", "index_url", "version", "updated_at"}
    | {"last_export", "last_change", "entity_count", "thing_count", "target_count", "public_url_prefix", "git_repo"}
    | {"content_type", "total_file_size", "statements_url", "entities_url", "delta_url"}
)
"""Fields about the source's own storage, and computed ones: they are left out without a warning."""


def checked_name(name: str) -> str:
    """Return a valid dataset name. Raises Misuse."""
    from tarn.model.names import DatasetName

    try:
        return str(DatasetName(name))
    except ValueError as error:
        raise Misuse(f"{error}: give it another name with --as") from None


def metadata(directory: DatasetDirectory) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of a configuration that are valid in Tarn, and the names of the others."""
    from pydantic import ValidationError

    from tarn.model.datasets.dataset import DatasetMetadata

    valid: dict[str, Any] = {}
    unknown: list[str] = []
    for name, value in directory.config().items():
        if name in SOURCE_FIELDS or value in (None, "", [], {}):
            continue
        value = COMPRESSION.get(value, value) if name == "compression" and isinstance(value, str) else value
        value = _plain_publisher(value) if name == "publisher" and isinstance(value, dict) else value
        try:
            checked = DatasetMetadata.model_validate({name: value})
        except ValidationError:
            unknown.append(name)
        else:
            valid[name] = checked.model_dump(mode="json", exclude_unset=True)[name]
    return valid, unknown


def mappings(directory: DatasetDirectory) -> Iterator[tuple[str, Any]]:
    """Yield each mapping with the source's hash of its file. Raises Misuse for invalid YAML."""
    from tarn.cli.input.yaml_reader import parse

    if not os.path.isdir(directory.mappings):
        return
    for checksum in sorted(os.listdir(directory.mappings)):
        path = os.path.join(directory.mappings, checksum, "mapping.yml")
        if not os.path.isfile(path):
            continue
        try:
            with open(path, encoding="utf-8") as file:
                mapping = parse(file.read())
        except (OSError, ValueError) as error:
            raise Misuse(f"{path} cannot be read: {error}") from None
        # The fields for the dataset and the hash are dropped: both are part of the URL.
        queries = mapping.get("queries") if isinstance(mapping, dict) else None
        yield checksum, _without_empty({"queries": queries} if queries is not None else mapping)


def _plain_publisher(publisher: dict[str, Any]) -> dict[str, Any]:
    """Return the publisher without the labels that FtM computes."""
    from tarn.model.datasets.dataset import Publisher

    return {name: value for name, value in publisher.items() if name in Publisher.model_fields and value is not None}


def _without_empty(value: Any) -> Any:
    """Return the value without empty fields: the source writes every possible field."""
    if isinstance(value, dict):
        return {name: _without_empty(field) for name, field in value.items() if field not in (None, [], {})}
    return [_without_empty(item) for item in value] if isinstance(value, list) else value
