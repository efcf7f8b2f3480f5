"""Documents edited by hand."""

import pytest
from tarn.datasets.config_documents import read_document
from tarn.errors import DocumentInvalid
from tarn.lake import catalog
from tarn.model.datasets.dataset import CatalogMetadata
from tarn.storage.layout import Layout
from tarn.storage.store import Store

BROKEN = [
    b"{",
    b"- a",
    b"title: [1]",
    b"title: !!timestamp never",
    b"title: !!bool perhaps",
    b"title: !!int ''",
    b"title: !!python/object:os.system x",
    b"title: &a [*a]",
    b"? [a]\n: b",
    b"\xff",
    b"[" * 200_000,
    b"- " * 200_000,
]


@pytest.fixture(params=["sqlite"])
def database_url(request: pytest.FixtureRequest, tmp_path) -> str:
    """Use no database."""
    return f"sqlite:///{tmp_path}/tarn.db"


@pytest.mark.parametrize("text", BROKEN, ids=lambda text: repr(text[:30]))
def test_any_defect_of_a_document_is_the_same_error(store: Store, text: bytes):
    store.put(Layout.config, text)

    with pytest.raises(DocumentInvalid, match=r"config\.yml in the lake cannot be read"):
        read_document(store, Layout.config, CatalogMetadata.from_yaml)
    with pytest.raises(DocumentInvalid):
        catalog.read(store)


def test_document_is_returned_with_its_bytes(store: Store):
    store.put(Layout.config, b"title:   Ours\n")

    assert read_document(store, Layout.config, CatalogMetadata.from_yaml) == (
        CatalogMetadata(title="Ours"),
        b"title:   Ours\n",
    )
