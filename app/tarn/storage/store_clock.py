"""The store's own clock, by which it says when an object was written."""

from datetime import datetime

from tarn.errors import Unavailable
from tarn.model.ids import new_id
from tarn.storage.layout import Layout
from tarn.storage.store import Store


def store_time(store: Store) -> datetime:
    """What the store's clock says now: a key of our own is written, looked at and removed.

    It is looked at in a listing, as those who compare with it do: a single look may give whole seconds where a
    listing gives fractions. Raises Unavailable.
    """
    path = Layout().probe(new_id())
    store.put(path, b"")
    try:
        written = next((entry.modified for entry in store.list(Layout.probes) if entry.path == path), None)
    finally:
        store.delete([path])
    if written is None:
        raise Unavailable("the object store does not list what it was just given")
    return written
