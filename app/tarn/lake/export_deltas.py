"""Which deltas a loader may apply to the entities that it loaded before, and the index that lists them.

Loaders such as yente know a version of a dataset and nothing else. They load the entities in full under the version
that the catalog names, and later apply every listed delta with a greater version, in order; if the version that they
hold is older than all that are listed, they load in full again. So two things must hold, whatever kinds were exported
and in which order:

1. The catalog's version names the state of the exported entities: that of their own run, or of a later delta which
   ends at the same state. Only deltas up to it are listed to those who follow the catalog.
2. A delta begins at the end of the one before it. If entities of a state in between were exported, somebody may have
   loaded those, and applying the delta to them would keep what was deleted since. Such a delta is marked `restart`, and
   the list of versions begins with it: it is older than nobody's, and everybody loads in full.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tarn.model.export import DELTA_INDEX, ExportRecord, Kind

Delta = dict[str, Any]
"""What is known of one delta: version, name, from, snapshot, content, size, restart."""


def export_url(url: str, dataset: str, name: str) -> str:
    """The address of an export, below where clients reach the API."""
    return f"{url.rstrip('/')}/v1/datasets/{dataset}/exports/{name}"


def kept_deltas(made: Mapping[Kind, ExportRecord]) -> list[Delta]:
    """The deltas that are kept, oldest first."""
    delta = made.get(Kind.DELTA)
    return [] if delta is None else list(delta.detail.get("kept", []))


def needs_restart(made: Mapping[Kind, ExportRecord]) -> bool:
    """Whether the next delta must be marked `restart`: entities of a state after the last delta were exported."""
    entities, delta = made.get(Kind.ENTITIES), made.get(Kind.DELTA)
    if entities is None or delta is None:
        return delta is None
    return entities.version > delta.version and entities.content != delta.content


def applicable(deltas: Sequence[Delta]) -> list[Delta]:
    """Those that follow on each other without a gap. One that does not say so was made by an earlier version."""
    restarts = [place for place, each in enumerate(deltas) if each.get("restart", True)]
    return list(deltas[restarts[-1] if restarts else 0 :])


def version_of(made: Mapping[Kind, ExportRecord]) -> str | None:
    """The version under which the exported entities are loaded; None: there are none."""
    entities = made.get(Kind.ENTITIES)
    if entities is None:
        return None
    return max([entities.version, *(str(each["version"]) for each in _deltas_at_entities(made))])


def loader_fields(dataset: str, made: Mapping[Kind, ExportRecord], url: str | None) -> dict[str, Any]:
    """What a loader needs besides the resources: which of them has the entities, and where deltas are listed.

    Nothing without an address, without exported entities, and if they are compressed: yente reads plain JSON only, and
    skips a dataset that names no resource.
    """
    entities = made.get(Kind.ENTITIES)
    if url is None or entities is None or entities.name != Kind.ENTITIES.form.name:
        return {}
    found: dict[str, Any] = {"resource_name": entities.name}
    version = str(version_of(made))
    listed = applicable([each for each in kept_deltas(made) if each["version"] <= version])
    if listed and listed[-1] in _deltas_at_entities(made) and all(each["name"].endswith(".json") for each in listed):
        found["delta_url"] = export_url(url, dataset, f"{DELTA_INDEX}?until={version}")
    return found


def index(dataset: str, delta: ExportRecord, url: str | None, until: str | None = None) -> dict[str, Any]:
    """`delta.json`: the deltas that are kept, up to a version. Without a URL, addresses are relative to it."""
    found = [each for each in kept_deltas({Kind.DELTA: delta}) if until is None or each["version"] <= until]
    paths = {each["version"]: f"delta/{each['name']}" for each in applicable(found)}
    return {
        "dataset": dataset,
        "updated_at": delta.resolved.isoformat(),
        "versions": {
            version: path if url is None else export_url(url, dataset, path) for version, path in paths.items()
        },
        "deltas": found,
    }


def _deltas_at_entities(made: Mapping[Kind, ExportRecord]) -> list[Delta]:
    """The deltas that end at the state of the exported entities."""
    entities, delta = made.get(Kind.ENTITIES), made.get(Kind.DELTA)
    if entities is None or delta is None:
        return []
    # An earlier version did not note the content that a delta ends at; that of the last one is known.
    ends = {each["version"]: each.get("content") for each in kept_deltas(made)} | {delta.version: delta.content}
    return [each for each in kept_deltas(made) if ends[each["version"]] == entities.content]
