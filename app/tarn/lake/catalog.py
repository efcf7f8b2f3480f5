"""The lake's own metadata, and the catalog of its datasets."""

from collections.abc import Mapping
from typing import Any

import orjson
from sqlalchemy import Connection

from tarn.access.audit import AuditedAction
from tarn.datasets import registry as datasets
from tarn.datasets.documents import read_document, replace_document
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.lake import export_deltas as deltas
from tarn.lake import export_records as exports
from tarn.model.dataset import Catalog, CatalogEntry, CatalogMetadata, DatasetConfig, Resource, etag
from tarn.model.export import ExportRecord, Kind, media_type
from tarn.storage.layout import Layout
from tarn.storage.store import Missing, Store

ATTEMPTS = 3


def read(store: Store) -> CatalogMetadata:
    """What the lake says of itself. Raises DocumentInvalid."""
    try:
        return read_document(store, Layout.config, CatalogMetadata.from_yaml)[0]
    except Missing:
        return CatalogMetadata()


def compile_catalog(database: Database, store: Store, readable: list[Dataset], url: str | None) -> Catalog:
    """The catalog of these datasets, as FtM tools load it, with resources below where the API is."""
    with database.read() as connection:
        made = exports.records_by_dataset(connection, readable)
    by_name = {dataset.name: made.get(dataset.id, {}) for dataset in readable}
    entries = [entry(config, by_name[config.name], url) for config in datasets.read_all(store, readable)]
    return Catalog(**read(store).model_dump(), datasets=entries)


def entry(config: DatasetConfig, made: Mapping[Kind, ExportRecord], url: str | None) -> CatalogEntry:
    """A dataset as a catalog lists it, with the exports that there are."""
    said = config.model_dump(include=set(CatalogEntry.model_fields)) | {"title": config.title or config.name}
    return CatalogEntry.model_validate(said | _export_fields(config, made, url) | _loader_fields(config, made, url))


def index_of(config: DatasetConfig, made: Mapping[Kind, ExportRecord], url: str | None) -> bytes:
    """`index.json` of a dataset, with the exports that there are."""
    exported = orjson.loads(orjson.dumps(_export_fields(config, made, url), default=_resource_json))
    return datasets.index_of(config, _loader_fields(config, made, url), **exported)


def indexing(dataset: Dataset, url: str | None) -> datasets.Indexed:
    """How `index.json` follows a change of the configuration: it tells of the same exports."""

    def indexed(connection: Connection, config: DatasetConfig) -> bytes:
        made = exports.records_of(connection, dataset)
        text = index_of(config, made, url)
        if (index := made.get(Kind.INDEX)) is not None:
            told = exports.index_detail(made, etag(config.to_yaml()))
            again = index.of(text)._replace(detail=told)
            exports.record(connection, dataset, again)
            exports.record_event(connection, dataset, again)
        return text

    return indexed


def _export_fields(config: DatasetConfig, made: Mapping[Kind, ExportRecord], url: str | None) -> dict[str, Any]:
    files = [one for kind, one in made.items() if kind is not Kind.INDEX]
    if not files:
        return {}
    counts = made[Kind.STATISTICS].detail if Kind.STATISTICS in made else {}
    return {
        "version": deltas.version_of(made) or max(one.version for one in files),
        "updated_at": max(one.resolved for one in files),
        "last_export": max(one.made for one in files),
        "entity_count": counts.get("entities"),
        "thing_count": counts.get("things"),
        "resources": [_resource(config, one, url) for one in files],
    }


def _loader_fields(config: DatasetConfig, made: Mapping[Kind, ExportRecord], url: str | None) -> dict[str, Any]:
    """What yente needs to load a dataset; nothing for one that it is to skip."""
    found = deltas.loader_fields(config.name, made, url)
    # A dataset with children is not loaded, as elsewhere it only sums those up. Here it has entities of its own.
    if found and config.children and made[Kind.ENTITIES].size:
        found["load"] = True
    return found


def _resource_json(resource: Resource) -> dict[str, Any]:
    return resource.model_dump(mode="json", exclude_none=True)


def _resource(config: DatasetConfig, made: ExportRecord, url: str | None) -> Resource:
    return Resource(
        name=made.name,
        url=None if url is None else deltas.export_url(url, config.name, made.name),
        checksum=made.sha1,
        timestamp=made.resolved,
        mime_type=media_type(made.kind, made.name),
        title=made.kind.form.title,
        size=made.size,
    )


def publish(database: Database, store: Store, url: str | None) -> None:
    """Write the catalog of all datasets to the lake's root, for who reads it without the API.

    Others may do so at the same time with what they know; so it is looked at once more afterwards.
    """
    text = b""
    for _ in range(ATTEMPTS):
        with database.read() as connection:
            found = datasets.page(connection, lambda _: True, None, None)
        latest = compile_catalog(database, store, found, url).model_dump_json(exclude_none=True, indent=2).encode()
        if latest == text:
            return
        text = latest
        with database.write() as connection:
            database.serialize(connection, "catalog")
            replace_document(connection, store, Layout.index, Layout.versions, text)


def change(database: Database, store: Store, wanted: CatalogMetadata, act: AuditedAction) -> CatalogMetadata:
    """Replace the fields that are given; the former document goes to `versions/`."""
    with database.write() as connection:
        database.serialize(connection, "catalog")
        changed = read(store).changed(wanted)
        act.done(connection, changed=sorted(wanted.model_fields_set))
        replace_document(connection, store, Layout.config, Layout.versions, changed.to_yaml())
    return changed
