"""Warnings about unflushed journal rows and queue items of an ftm-lakehouse, which cannot be imported."""

import os
import re
import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime

from tarn.cli.importing.layouts import QUEUE, DatasetDirectory

JOURNAL = "journal.db"
UPDATED, FLUSHED = "last_updated", "last_flushed"


def pending(directory: DatasetDirectory) -> Iterator[str]:
    """Yield a sentence for each kind of data that is not in the directory's tables yet."""
    rows = _journal_rows(directory)
    if rows:
        yield f"{rows} rows of the source's journal ({_journal(directory)}) are not imported: flush it first"
    elif rows is None and _is_behind(directory):
        yield (
            "the source's journal was written after its last flush, and those rows are not imported: "
            "flush it first, in the database that LAKEHOUSE_JOURNAL_URI names"
        )
    waiting = sum(len(names) for _, _, names in os.walk(directory.at(QUEUE)))
    if waiting:
        yield f"{waiting} items of the source's queue are not imported: let the source process them first"


def _journal(directory: DatasetDirectory) -> str:
    return os.path.join(os.path.dirname(directory.folder), JOURNAL)


def _journal_rows(directory: DatasetDirectory) -> int | None:
    """Return the number of rows in the journal at its default path, next to the dataset; None if there is none."""
    if not os.path.isfile(_journal(directory)):
        return None
    name = re.escape(directory.name())
    try:
        with sqlite3.connect(f"file:{_journal(directory)}?mode=ro", uri=True) as journal:
            tables = [table for (table,) in journal.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            own = [table for table in tables if re.fullmatch(rf"journal_{name}(-seg-.*)?", table)]
            return sum(int(journal.execute(f'SELECT count(*) FROM "{table}"').fetchone()[0]) for table in own)  # noqa: S608
    except sqlite3.Error:
        return None


def _is_behind(directory: DatasetDirectory) -> bool:
    updated, flushed = _moment(directory, UPDATED), _moment(directory, FLUSHED)
    return updated is not None and (flushed is None or flushed < updated)


def _moment(directory: DatasetDirectory, name: str) -> datetime | None:
    try:
        with open(directory.at("tags", "lakehouse", "journal", name), encoding="utf-8") as file:
            moment = datetime.fromisoformat(file.read().strip().strip('"'))
    except (OSError, ValueError):
        return None
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
