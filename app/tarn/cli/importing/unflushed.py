"""What a lakehouse has taken and not written to its directory: told, as it cannot be imported."""

import os
import re
import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime

from tarn.cli.importing.layouts import QUEUE, DatasetDirectory

JOURNAL = "journal.db"
UPDATED, FLUSHED = "last_updated", "last_flushed"


def pending(place: DatasetDirectory) -> Iterator[str]:
    """A sentence for each thing that is not in the directory's tables yet."""
    rows = _journal_rows(place)
    if rows:
        yield f"{rows} rows wait in the source's journal ({_journal(place)}) and are not imported: flush it first"
    elif rows is None and _is_behind(place):
        yield (
            "the source's journal was written after its last flush, and what is only there is not imported: "
            "flush it first, in the database that LAKEHOUSE_JOURNAL_URI names"
        )
    waiting = sum(len(names) for _, _, names in os.walk(place.at(QUEUE)))
    if waiting:
        yield f"{waiting} items wait in the source's queue and are not imported: let it work them off first"


def _journal(place: DatasetDirectory) -> str:
    return os.path.join(os.path.dirname(place.folder), JOURNAL)


def _journal_rows(place: DatasetDirectory) -> int | None:
    """Rows in the journal that lies beside the dataset, where it lies unless it is set otherwise; None if none does."""
    if not os.path.isfile(_journal(place)):
        return None
    name = re.escape(place.name())
    try:
        with sqlite3.connect(f"file:{_journal(place)}?mode=ro", uri=True) as journal:
            tables = [table for (table,) in journal.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            ours = [table for table in tables if re.fullmatch(rf"journal_{name}(-seg-.*)?", table)]
            return sum(int(journal.execute(f'SELECT count(*) FROM "{table}"').fetchone()[0]) for table in ours)  # noqa: S608
    except sqlite3.Error:
        return None


def _is_behind(place: DatasetDirectory) -> bool:
    updated, flushed = _moment(place, UPDATED), _moment(place, FLUSHED)
    return updated is not None and (flushed is None or flushed < updated)


def _moment(place: DatasetDirectory, name: str) -> datetime | None:
    try:
        with open(place.at("tags", "lakehouse", "journal", name), encoding="utf-8") as file:
            moment = datetime.fromisoformat(file.read().strip().strip('"'))
    except (OSError, ValueError):
        return None
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
