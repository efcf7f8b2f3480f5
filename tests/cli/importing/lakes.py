"""Write directories in the layouts of ftm-lakehouse.

The layouts were read from directories that versions 0.3.0, 0.4.0 and 0.7.1 wrote:

- 0.3 has the Delta table `entities/statements`, partitioned by `bucket` and `origin`, with FtM's columns, `source` and
  `bucket`, its times without a zone (`timestampNtz`, so reader version 3), and one row per statement id; and the
  table `entities/translog` with `id`, `first_seen`, `last_seen` and `deleted_at`, in UTC. A flush inserts a row for a
  new id and updates `last_seen` of a known one; a delete sets `deleted_at`. Adding a deleted statement again does not
  reset `deleted_at`, and no reader of that version shows the statement.
- 0.4 has `entities/statements` alone, partitioned by `shard`, `bucket` and `origin`, times in UTC, with `deleted_at`.
  It is append-only: adding a statement again adds a row, and a delete adds a row with `deleted_at` and the same time as
  `last_seen`. `merge` keeps the newest row of an id, with the first `first_seen`.
- 0.5 to 0.7 have the same in `statements`, without `canonical_id`, with `fragment` (empty for none) and, from 0.6 on,
  `role`. With a fragment, the newest rows of (origin, entity, property, fragment, role) replace the others.
- The archive has `archive/ab/cd/ef/{sha256}/blob` (0.1 and 0.2: SHA-1), with a
  `{file_id}.json` for each path and a `{origin}.txt` for each extracted text in the same folder. 0.1.0 has the content
  at `…/{sha1}` and its record at `…/{sha1}.json`.
- `config.yml` is FtM's metadata with the catalog's fields (`uri`, `resources`, `stats`, `shards`).
- Tags are files below `tags/lakehouse` with an ISO timestamp in quotes; those of the journal show whether it has
  unflushed rows.
"""

import hashlib
import json
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import write_deltalake
from followthemoney import Statement

BEGIN = datetime(2030, 1, 1, tzinfo=UTC)
NAIVE, ZONED = pa.timestamp("us"), pa.timestamp("us", tz="UTC")
TEXT = (
    "id",
    "entity_id",
    "canonical_id",
    "dataset",
    "bucket",
    "origin",
    "source",
    "schema",
    "prop",
    "prop_type",
    "value",
)


def moment(minutes: int) -> datetime:
    return BEGIN + timedelta(minutes=minutes)


def statement_row(
    entity: str, prop: str, value: str, origin: str = "crawl", at: int = 0, **more: Any
) -> dict[str, Any]:
    """Return a row of the store: a statement first and last seen so many minutes after `BEGIN`."""
    lang, external = more.get("lang"), more.get("external", False)
    row = {
        "id": Statement.make_key("source", entity, prop, value, external, lang=lang),
        "entity_id": entity,
        "canonical_id": entity,
        "dataset": "source",
        "bucket": "thing",
        "origin": origin,
        "source": None,
        "schema": "Person",
        "prop": prop,
        "prop_type": "id" if prop == "id" else "name",
        "value": value,
        "original_value": None,
        "lang": lang,
        "external": external,
        "first_seen": moment(at),
        "last_seen": moment(at),
        "shard": "0",
        "fragment": "",
        "role": None,
        "deleted_at": None,
    }
    return row | more


def tombstone(row: dict[str, Any], at: int) -> dict[str, Any]:
    """Return the tombstone of a row."""
    return row | {"last_seen": moment(at), "deleted_at": moment(at)}


def write_with_translog(folder: Path, flushes: Iterable[list[dict[str, Any]]], deletes: dict[str, int]) -> None:
    """Write a dataset like 0.3 does. Known rows in later flushes are seen again; `deletes` are minutes by statement."""
    seen: dict[str, dict[str, Any]] = {}
    for rows in flushes:
        new = [row for row in rows if row["id"] not in seen]
        for row in rows:
            line = seen.setdefault(
                row["id"], {name: row[name] for name in ("id", "first_seen", "last_seen", "deleted_at")}
            )
            line["last_seen"] = row["last_seen"]
        _append(folder / "entities/statements", new, [*TEXT, *REST], ["bucket", "origin"], NAIVE)
    for statement, at in deletes.items():
        seen[statement]["deleted_at"] = moment(at)
    columns = ["id", "first_seen", "last_seen", "deleted_at"]
    _append(folder / "entities/translog", list(seen.values()), columns, [], ZONED)


def write_with_inline_deletes(folder: Path, flushes: Iterable[list[dict[str, Any]]], table: str = "statements") -> None:
    """Write a dataset like 0.5 to 0.7 do, or with the table `entities/statements` like 0.4 does."""
    old = table != "statements"
    added = ["shard", "deleted_at"] if old else ["shard", "fragment", "role", "deleted_at"]
    columns = [name for name in (*TEXT, *REST, *added) if old or name != "canonical_id"]
    for rows in flushes:
        _append(folder / table, rows, columns, ["shard", "bucket", "origin"], ZONED)


def archive_content(
    folder: Path, content: bytes, *keys: str, texts: dict[str, str] | None = None, **metadata: Any
) -> str:
    """Write a content into the archive, with a record for each of its paths; return its checksum."""
    checksum = hashlib.sha256(content).hexdigest()
    target = folder / "archive" / checksum[:2] / checksum[2:4] / checksum[4:6] / checksum
    target.mkdir(parents=True, exist_ok=True)
    (target / "blob").write_bytes(content)
    for key in keys:
        _record(target / f"file-{hashlib.sha1(key.encode()).hexdigest()}.json", key, content, checksum, metadata)
    for origin, text in (texts or {}).items():
        (target / f"{origin}.txt").write_text(text)
    return checksum


def archive_content_by_sha1(folder: Path, content: bytes, key: str) -> str:
    """Write a content and its record like 0.1.0 does, under its SHA-1; return the SHA-1."""
    checksum = hashlib.sha1(content).hexdigest()
    target = folder / "archive" / checksum[:2] / checksum[2:4] / checksum[4:6]
    target.mkdir(parents=True, exist_ok=True)
    (target / checksum).write_bytes(content)
    _record(target / f"{checksum}.json", key, content, checksum, {})
    return checksum


REST = ("original_value", "lang", "external", "first_seen", "last_seen")


def _record(path: Path, key: str, content: bytes, checksum: str, metadata: dict[str, Any]) -> None:
    record = {
        "name": key.rsplit("/", 1)[-1],
        "created_at": "2030-01-01T00:00:00Z",
        "updated_at": "2030-01-01T00:00:00Z",
        "size": len(content),
        "store": "lakehouse://",
        "key": key,
        "mimetype": "text/plain",
        "dataset": "source",
        "checksum": checksum,
        "extra": {},
        "origin": "archive",
        "id": path.stem,
        "path": key,
        "parent": None,
    }
    path.write_text(json.dumps(record | metadata))


def _append(folder: Path, rows: list[dict[str, Any]], columns: list[str], partitions: list[str], times: Any) -> None:
    kinds = {"external": pa.bool_(), "first_seen": times, "last_seen": times, "deleted_at": times}
    schema = pa.schema([(name, kinds.get(name, pa.string())) for name in columns])
    values = [{name: _stored(row[name], times) for name in columns} for row in rows]
    if values:
        folder.mkdir(parents=True, exist_ok=True)
        write_deltalake(
            str(folder), pa.Table.from_pylist(values, schema), mode="append", partition_by=partitions or None
        )


def _stored(value: Any, times: Any) -> Any:
    return value.replace(tzinfo=None) if isinstance(value, datetime) and times == NAIVE else value
