"""The catalog: the lake's own metadata, and the list of its datasets with their exports."""

from collections.abc import Mapping
from typing import Any

import orjson
from sqlalchemy import Connection

from tarn.access.audit import AuditedAction
from tarn.datasets import registry
from tarn.datasets.config_documents import read_document, replace_document
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.lake import export_deltas, export_records
from tarn.model.datasets.dataset import Catalog, CatalogEntry, CatalogMetadata, DatasetConfig, Resource
from tarn.model.datasets.export import ExportKind, ExportRecord, media_type
from tarn.model.entity_tags import etag
from tarn.storage.layout import Layout
from tarn.storage.store import ObjectMissing, Store

ATTEMPTS = 3


def read(store: Store) -> CatalogMetadata:
    """Read the lake's metadata. Raises DocumentInvalid."""
    try:
        return read_document(store, Layout.config, CatalogMetadata.from_yaml)[0]
    except ObjectMissing:
        return CatalogMetadata()


def compile_catalog(database: Database, store: Store, readable: registry.Readable, url: str | None) -> Catalog:
    """Return the catalog of the datasets for which `readable` is true, in the format FtM tools load.

    The URLs of the resources are below the API's URL.
    """
    with database.read() as connection:
        datasets = registry.page(connection, readable, None, None)
        records = export_records.records_by_dataset(connection, datasets)
    by_name = {dataset.name: records.get(dataset.id, {}) for dataset in datasets}
    entries = [entry(config, by_name[config.name], url) for config in registry.read_all(store, datasets)]
    return Catalog(**read(store).model_dump(), datasets=entries)


def entry(config: DatasetConfig, records: Mapping[ExportKind, ExportRecord], url: str | None) -> CatalogEntry:
    """Return the catalog entry of a dataset, with its exports."""
    fields = config.model_dump(include=set(CatalogEntry.model_fields)) | {"title": config.title or config.name}
    return CatalogEntry.model_validate(
        fields | _export_fields(config, records, url) | _loader_fields(config, records, url)
    )


def index_of(config: DatasetConfig, records: Mapping[ExportKind, ExportRecord], url: str | None) -> bytes:
    """Return `index.json` of a dataset, with its exports."""
    fields = orjson.loads(orjson.dumps(_export_fields(config, records, url), default=_resource_json))
    return registry.index_of(config, _loader_fields(config, records, url), **fields)


def indexing(dataset: Dataset, url: str | None) -> registry.IndexBuilder:
    """Return the function that rewrites `index.json` after a change of the configuration. It lists the same exports."""

    def build_index(connection: Connection, config: DatasetConfig) -> bytes:
        records = export_records.records_of(connection, dataset)
        text = index_of(config, records, url)
        if (index := records.get(ExportKind.INDEX)) is not None:
            detail = export_records.index_detail(records, etag(config.to_yaml()))
            changed_record = index.of(text)._replace(detail=detail)
            export_records.record(connection, dataset, changed_record)
            export_records.record_event(connection, dataset, changed_record)
        return text

    return build_index


def _export_fields(
    config: DatasetConfig, records: Mapping[ExportKind, ExportRecord], url: str | None
) -> dict[str, Any]:
    files = [record for kind, record in records.items() if kind is not ExportKind.INDEX]
    if not files:
        return {}
    counts = records[ExportKind.STATISTICS].detail if ExportKind.STATISTICS in records else {}
    return {
        "version": export_deltas.version_of(records) or max(record.version for record in files),
        "updated_at": max(record.resolved for record in files),
        "last_export": max(record.made for record in files),
        "entity_count": counts.get("entities"),
        "thing_count": counts.get("things"),
        "resources": [_resource(config, record, url) for record in files],
    }


def _loader_fields(
    config: DatasetConfig, records: Mapping[ExportKind, ExportRecord], url: str | None
) -> dict[str, Any]:
    """Return what yente needs to load a dataset; empty for one that it is to skip."""
    fields = export_deltas.loader_fields(config.name, records, url)
    # yente does not load a dataset with children, as elsewhere it only combines them. Here it has entities of its own.
    if fields and config.children and records[ExportKind.ENTITIES].size:
        fields["load"] = True
    return fields


def _resource_json(resource: Resource) -> dict[str, Any]:
    return resource.model_dump(mode="json", exclude_none=True)


def _resource(config: DatasetConfig, record: ExportRecord, url: str | None) -> Resource:
    return Resource(
        name=record.name,
        url=None if url is None else export_deltas.export_url(url, config.name, record.name),
        checksum=record.sha1,
        timestamp=record.resolved,
        mime_type=media_type(record.kind, record.name),
        title=record.kind.form.title,
        size=record.size,
    )


def publish(database: Database, store: Store, url: str | None) -> None:
    """Write the catalog of all datasets to the lake's root, for clients that read the lake without the API.

    Other processes may do so concurrently from an older state; so the catalog is compiled again until it is unchanged.
    """
    text = b""
    for _ in range(ATTEMPTS):
        catalog = compile_catalog(database, store, lambda _: True, url)
        latest = catalog.model_dump_json(exclude_none=True, indent=2).encode()
        if latest == text:
            return
        text = latest
        with database.write() as connection:
            database.serialize(connection, "catalog")
            replace_document(connection, store, Layout.index, Layout.versions, text)


def change(database: Database, store: Store, changes: CatalogMetadata, act: AuditedAction) -> CatalogMetadata:
    """Replace the fields that are set in `changes`; the former document is kept below `versions/`."""
    with database.write() as connection:
        database.serialize(connection, "catalog")
        changed = read(store).changed(changes)
        act.done(connection, changed=sorted(changes.model_fields_set))
        replace_document(connection, store, Layout.config, Layout.versions, changed.to_yaml())
    return changed
