"""What a lakehouse says of a dataset and of its mappings, as Tarn takes it."""

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
"""What is about where and how the source keeps it, and is made anew: nothing is said of its being left out."""


def checked_name(name: str) -> str:
    """A name that Tarn takes. Raises Misuse."""
    from tarn.model.names import DatasetName

    try:
        return str(DatasetName(name))
    except ValueError as error:
        raise Misuse(f"{error}: give it another name with --as") from None


def metadata(place: DatasetDirectory) -> tuple[dict[str, Any], list[str]]:
    """The fields of a configuration that Tarn has a place for, and the names of those that it cannot take."""
    from pydantic import ValidationError

    from tarn.model.dataset import DatasetMetadata

    kept: dict[str, Any] = {}
    left: list[str] = []
    for name, value in place.config().items():
        if name in SOURCE_FIELDS or value in (None, "", [], {}):
            continue
        value = COMPRESSION.get(value, value) if name == "compression" and isinstance(value, str) else value
        value = _plain_publisher(value) if name == "publisher" and isinstance(value, dict) else value
        try:
            checked = DatasetMetadata.model_validate({name: value})
        except ValidationError:
            left.append(name)
        else:
            kept[name] = checked.model_dump(mode="json", exclude_unset=True)[name]
    return kept, left


def mappings(place: DatasetDirectory) -> Iterator[tuple[str, Any]]:
    """The mapping for each content, under the hash that the source knows it by. Raises Misuse for what is no YAML."""
    from tarn.cli.input.yaml_reader import parse

    if not os.path.isdir(place.mappings):
        return
    for checksum in sorted(os.listdir(place.mappings)):
        path = os.path.join(place.mappings, checksum, "mapping.yml")
        if not os.path.isfile(path):
            continue
        try:
            with open(path, encoding="utf-8") as file:
                said = parse(file.read())
        except (OSError, ValueError) as error:
            raise Misuse(f"{path} cannot be read: {error}") from None
        # The dataset and the hash, which stand beside the queries, are told by where the mapping is put.
        queries = said.get("queries") if isinstance(said, dict) else None
        yield checksum, _without_empty({"queries": queries} if queries is not None else said)


def _plain_publisher(publisher: dict[str, Any]) -> dict[str, Any]:
    """Without the labels that FtM computes."""
    from tarn.model.dataset import Publisher

    return {name: value for name, value in publisher.items() if name in Publisher.model_fields and value is not None}


def _without_empty(value: Any) -> Any:
    """The same without fields that say nothing: the source writes down every field that there could be."""
    if isinstance(value, dict):
        return {name: _without_empty(field) for name, field in value.items() if field not in (None, [], {})}
    return [_without_empty(item) for item in value] if isinstance(value, list) else value
