"""Delta exports: the list of deltas a loader may apply to entities it loaded before, and the index `delta.json`.

Loaders such as yente keep only the version of a dataset. They load the entities in full under the version that the
catalog names, and later apply every listed delta with a greater version, in order; if their version is older than all
listed ones, they load in full again. So two rules must hold, whatever kinds were exported and in which order:

1. The catalog's version names the state of the exported entities: the version of their own export, or of a later delta
   that ends at the same state. Clients that follow the catalog are shown only deltas up to that version.
2. A delta begins where the previous one ends. If entities of a state in between were exported, a loader may have
   loaded those, and applying the delta to them would keep statements deleted since. Such a delta is marked `restart`,
   and the list of versions begins with it: every loader's version is older than the list, so all load in full.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tarn.model.datasets.export import DELTA_INDEX, ExportKind, ExportRecord

Delta = dict[str, Any]
"""The properties of one delta: version, name, from, snapshot, content, size, restart."""


def export_url(url: str, dataset: str, name: str) -> str:
    """Return the URL of an export, given the base URL of the API."""
    return f"{url.rstrip('/')}/v1/datasets/{dataset}/exports/{name}"


def kept_deltas(records: Mapping[ExportKind, ExportRecord]) -> list[Delta]:
    """Return the kept deltas, oldest first."""
    delta = records.get(ExportKind.DELTA)
    return [] if delta is None else list(delta.detail.get("kept", []))


def needs_restart(records: Mapping[ExportKind, ExportRecord]) -> bool:
    """Return whether the next delta must be marked `restart`: entities were exported after the state it begins at."""
    entities, delta = records.get(ExportKind.ENTITIES), records.get(ExportKind.DELTA)
    if entities is None or delta is None:
        return delta is None
    return entities.version > delta.version and entities.content != delta.content


def applicable(deltas: Sequence[Delta]) -> list[Delta]:
    """Return the trailing deltas that are contiguous. One without `restart` was made by an older release: a restart."""
    restarts = [position for position, each in enumerate(deltas) if each.get("restart", True)]
    return list(deltas[restarts[-1] if restarts else 0 :])


def version_of(records: Mapping[ExportKind, ExportRecord]) -> str | None:
    """Return the version under which the exported entities are loaded, or None if no entities were exported."""
    entities = records.get(ExportKind.ENTITIES)
    if entities is None:
        return None
    return max([entities.version, *(str(each["version"]) for each in _deltas_at_entities(records))])


def loader_fields(dataset: str, records: Mapping[ExportKind, ExportRecord], url: str | None) -> dict[str, Any]:
    """Return what a loader needs in addition to the resources: the name of the entities resource, the deltas' URL.

    Empty without a URL, without exported entities, and if they are compressed: yente reads uncompressed JSON only, and
    skips a dataset that names no resource.
    """
    entities = records.get(ExportKind.ENTITIES)
    if url is None or entities is None or entities.name != ExportKind.ENTITIES.form.name:
        return {}
    fields: dict[str, Any] = {"resource_name": entities.name}
    version = str(version_of(records))
    listed = applicable([each for each in kept_deltas(records) if each["version"] <= version])
    if listed and listed[-1] in _deltas_at_entities(records) and all(each["name"].endswith(".json") for each in listed):
        fields["delta_url"] = export_url(url, dataset, f"{DELTA_INDEX}?until={version}")
    return fields


def index(dataset: str, delta: ExportRecord, url: str | None, until: str | None = None) -> dict[str, Any]:
    """Return `delta.json`: the kept deltas up to a version. Without a URL, addresses are relative to this document."""
    deltas = [each for each in kept_deltas({ExportKind.DELTA: delta}) if until is None or each["version"] <= until]
    paths = {each["version"]: f"delta/{each['name']}" for each in applicable(deltas)}
    return {
        "dataset": dataset,
        "updated_at": delta.resolved.isoformat(),
        "versions": {
            version: path if url is None else export_url(url, dataset, path) for version, path in paths.items()
        },
        "deltas": deltas,
    }


def _deltas_at_entities(records: Mapping[ExportKind, ExportRecord]) -> list[Delta]:
    """Return the deltas that end at the state of the exported entities."""
    entities, delta = records.get(ExportKind.ENTITIES), records.get(ExportKind.DELTA)
    if entities is None or delta is None:
        return []
    # Older releases did not store the content that a delta ends at; that of the last one is known.
    ends = {each["version"]: each.get("content") for each in kept_deltas(records)} | {delta.version: delta.content}
    return [each for each in kept_deltas(records) if ends[each["version"]] == entities.content]
