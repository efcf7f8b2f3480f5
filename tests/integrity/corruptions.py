"""Hand-made corruptions, each of one object or row of the lake of `tests.integrity.lakes.rich_lake`.

Snapshots 1 and 2 are expired; 3 to 6 and 8 are flushes, 5 of a stage, 6 with a rejected event; 7 only packed files; 9
expired the first two; 10 and 11 are flushes. A ref names 4. One batch is unflushed.
"""

import shutil
from collections.abc import Callable
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from tarn.model.datasets.snapshot import File
from tarn.model.ids import new_id

from tests.integrity.lakes import Lake
from tests.journal.convert_to_packs import pack_rows

Corrupt = Callable[[Lake], None]


# Data files


def newest(lake: Lake) -> File:
    """Return a file of the newest statements, among them one of an entity of its own, `last 1`."""
    table = lake.head().statements
    return next(file for file in table.files if file.path in table.added and file.partition["origin"] == "crawl")


def unchecked(lake: Lake) -> File:
    """Return the same without its checksum, which would detect the change."""
    file = newest(lake)
    lake.restate("statements", file, lambda entry: entry.pop("checksum"))
    return file


def delete_file(lake: Lake) -> None:
    lake.at(lake.path("statements", newest(lake))).unlink()


def delete_file_of_history(lake: Lake) -> None:
    (removed,) = lake.manifest(7).translog.removed
    lake.at(f"{lake.dataset.layout.table('translog')}/{removed}").unlink()


def truncate_file(lake: Lake) -> None:
    place = lake.at(lake.path("statements", newest(lake)))
    place.write_bytes(place.read_bytes()[:-10])


def flip_bytes(lake: Lake) -> None:
    place = lake.at(lake.path("statements", newest(lake)))
    data = bytearray(place.read_bytes())
    data[100] ^= 0xFF
    place.write_bytes(data)


def break_page(lake: Lake) -> None:
    place = lake.at(lake.path("statements", unchecked(lake)))
    place.write_bytes(place.read_bytes()[:4] + b"\xff" * 60 + place.read_bytes()[64:])


def break_footer(lake: Lake) -> None:
    place = lake.at(lake.path("statements", unchecked(lake)))
    place.write_bytes(place.read_bytes()[:-8] + bytes(8))


def swap_files(lake: Lake) -> None:
    files = sorted(lake.head().statements.files, key=lambda file: file.size)
    one, other = (lake.at(lake.path("statements", file)) for file in (files[0], files[-1]))
    data = one.read_bytes()
    shutil.copy(other, one)
    other.write_bytes(data)


def remove_rows_without_updating_the_count(lake: Lake) -> None:
    """Rewrite a file with fewer rows, and update its recorded size but not its recorded number of rows."""
    file = newest(lake)
    lake.edit_rows("statements", file, lambda table: table.slice(1))
    lake.restate("statements", file, lambda entry: entry.update(rows=file.rows))


def drop_column(lake: Lake) -> None:
    lake.edit_rows("statements", newest(lake), lambda table: table.drop_columns(["lang"]))


def reverse_rows(lake: Lake) -> None:
    file = max(lake.head().statements.files, key=lambda file: file.rows)
    lake.edit_rows("statements", file, lambda table: table.take(list(range(table.num_rows))[::-1]))


def narrow_bounds(lake: Lake) -> None:
    file = newest(lake)
    lake.restate("statements", file, lambda entry: entry["columns"]["entity_id"].update(min="zz", max="zz"))


def lose_statement(lake: Lake) -> None:
    others = pc.not_equal(pc.field("entity_id"), "last 1")
    lake.edit_rows("statements", newest(lake), lambda table: table.filter(others))


def duplicate_statement(lake: Lake) -> None:
    lake.edit_rows("statements", newest(lake), lambda table: pa.concat_tables([table.slice(0, 1), table]))


def mark_missing_statement(lake: Lake) -> None:
    """Point the first mark at a statement that never existed; rows stay sorted."""
    file = next(file for file in lake.head().translog.files if file.partition["kind"] == "delete")

    def edit(table: pa.Table) -> pa.Table:
        ids = [bytes(20), *table.column("id").to_pylist()[1:]]
        return table.set_column(table.column_names.index("id"), "id", pa.array(ids, pa.binary()))

    lake.edit_rows("translog", file, edit)


# Manifests


def delete_manifest(seq: int) -> Corrupt:
    return lambda lake: lake.at(lake.dataset.layout.snapshot(seq)).unlink()


def truncate_manifest(lake: Lake) -> None:
    place = lake.at(lake.dataset.layout.snapshot(8))
    place.write_bytes(place.read_bytes()[:200])


def edit_manifest(seq: int, *steps: Any, to: Any) -> Corrupt:
    """Change one field, found by these steps; `to` may be a function of the former value."""

    def edit(manifest: dict[str, Any]) -> None:
        *way, last = steps
        place: Any = manifest
        for step in way:
            place = place[step]
        place[last] = to(place.get(last)) if callable(to) else to

    return lambda lake: lake.edit_manifest(seq, edit)


def forget_file(seq: int) -> Corrupt:
    return lambda lake: lake.edit_manifest(seq, lambda manifest: manifest["statements"]["files"].pop())


def misstate_size(lake: Lake) -> None:
    lake.edit_manifest(11, lambda manifest: manifest["statements"]["files"][-1].update(size=1))


def misstate_size_in_history(lake: Lake) -> None:
    lake.edit_manifest(5, lambda manifest: manifest["statements"]["files"][0].update(size=1))


def put_stray(lake: Lake) -> None:
    shutil.copy(lake.at(lake.dataset.layout.snapshot(3)), lake.at(lake.dataset.layout.snapshot(0)))


def occupy_next_number(lake: Lake) -> None:
    place = lake.at(lake.dataset.layout.snapshot(12))
    place.write_bytes(lake.head().model_copy(update={"seq": 12}).to_json())


# SQL

OWN = "WHERE dataset_id = :dataset"


def sql(statement: str, **parameters: Any) -> Corrupt:
    return lambda lake: lake.sql(statement, **parameters)


def rewind_head(lake: Lake) -> None:
    former = lake.manifest(10)
    lake.sql(
        f"UPDATE snapshot_heads SET seq = 10, snapshot = :id, content = :content, segment = :segment {OWN}",
        id=former.id,
        content=former.content,
        segment=former.segment,
    )


def rewind_history(lake: Lake) -> None:
    """Restore the history in the database to an earlier state, as a restore from backup would."""
    rewind_head(lake)
    lake.sql(f"DELETE FROM snapshots {OWN} AND seq = 11")


def repeat_commit(lake: Lake) -> None:
    columns = (
        'dataset_id, tenant, origin, is_stage, segment, entities, reserved, metadata, created, expires, state, "commit"'
    )
    lake.sql(
        f"INSERT INTO journal_batches (uid, rows, size, {columns}) "
        f"SELECT :uid, 0, 0, {columns} FROM journal_batches {OWN} AND state = 'committed' AND NOT is_stage LIMIT 1",
        uid=new_id(),
    )


# Delta logs


def log_entry(lake: Lake, version: int) -> Any:
    return lake.at(lake.dataset.layout.delta_log(lake.dataset.layout.table("statements"), version))


def delete_log_entry(lake: Lake) -> None:
    log_entry(lake, lake.manifest(3).statements.version).unlink()


def commit_at_pinned_version(lake: Lake) -> None:
    place = log_entry(lake, lake.manifest(3).statements.version)
    lines = [orjson.loads(line) for line in place.read_bytes().splitlines()]
    extra = next(line for line in lines if "add" in line)
    name = extra["add"]["path"].rsplit("/", 1)[-1]
    lines.append({"add": extra["add"] | {"path": extra["add"]["path"].replace(name, "strange.parquet")}})
    place.write_bytes(b"\n".join(map(orjson.dumps, lines)))


def commit_after_the_head(lake: Lake) -> None:
    """Delete through Delta, as a foreign tool would."""
    uri = lake.store.connection.table_uri(lake.dataset.layout.table("statements"))
    DeltaTable(uri).delete("origin = 'crawl'")


# Documents


def delete_document(path: Callable[[Lake], str]) -> Corrupt:
    return lambda lake: lake.at(path(lake)).unlink()


def write_document(path: Callable[[Lake], str], text: bytes) -> Corrupt:
    def write(lake: Lake) -> None:
        lake.at(path(lake)).write_bytes(text)

    return write


def config(lake: Lake) -> str:
    return lake.dataset.layout.config


def head_hint(lake: Lake) -> str:
    return lake.dataset.layout.snapshot_head


def ref_mirror(lake: Lake) -> str:
    return f"{lake.dataset.layout.refs}/july.json"


# Packs of the journal


def lose_pack(lake: Lake) -> None:
    pack_rows(lake.database)
    lake.sql("DELETE FROM journal_packs")


def damage_pack(lake: Lake) -> None:
    pack_rows(lake.database)
    assert lake.kinds() == set()
    lake.sql("UPDATE journal_packs SET data = x'00'")
