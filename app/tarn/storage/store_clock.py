"""The store's clock, which sets the modification times of objects."""

from datetime import datetime

from tarn.errors import Unavailable
from tarn.model.ids import new_id
from tarn.storage.layout import Layout
from tarn.storage.store import Store


def store_time(store: Store) -> datetime:
    """Return the store's current time: write a probe key, read its modification time and delete it.

    The time is read from a listing, as the callers that compare with it do: a HEAD request may give whole seconds where
    a listing gives fractions. Raises Unavailable.
    """
    path = Layout().probe(new_id())
    store.put(path, b"")
    try:
        written = next((entry.modified for entry in store.list(Layout.probes) if entry.path == path), None)
    finally:
        store.delete([path])
    if written is None:
        raise Unavailable("the object store does not list an object that was just written")
    return written
