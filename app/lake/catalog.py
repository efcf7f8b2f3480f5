"""The lake's own metadata, and the catalog of its datasets."""

from app.db.engine import Database
from app.lake import datasets
from app.lake.datasets import Dataset
from app.lake.documents import read_document, replace_document
from app.model.dataset import Catalog, CatalogMetadata
from app.storage.layout import Layout
from app.storage.store import Missing, Store
from app.tenancy.audit import Act


def read(store: Store) -> CatalogMetadata:
    """What the lake says of itself. Raises DocumentInvalid."""
    try:
        return read_document(store, Layout.config, CatalogMetadata.from_yaml)[0]
    except Missing:
        return CatalogMetadata()


def compile_catalog(store: Store, readable: list[Dataset]) -> Catalog:
    """The catalog of these datasets, as FtM tools load it."""
    entries = [config.entry() for config in datasets.read_all(store, readable)]
    return Catalog(**read(store).model_dump(), datasets=entries)


def change(database: Database, store: Store, wanted: CatalogMetadata, act: Act) -> CatalogMetadata:
    """Replace the fields that are given; the former document goes to `versions/`."""
    with database.write() as connection:
        database.serialize(connection, "catalog")
        changed = read(store).changed(wanted)
        act.done(connection, changed=sorted(wanted.model_fields_set))
        replace_document(connection, store, Layout.config, Layout.versions, changed.to_yaml())
    return changed
