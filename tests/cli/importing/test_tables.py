"""Import of statements: the live statements of a lakehouse's tables."""

from pathlib import Path
from typing import Any

import pytest
from tarn.cli.failures import Misuse
from tarn.cli.importing.layouts import DatasetDirectory, find_datasets
from tarn.cli.importing.tables import SourceStatements

from tests.cli.importing.lakes import moment, statement_row, tombstone, write_with_inline_deletes, write_with_translog

JANE, JOE, ANN = (
    statement_row("jane", "name", "Jane Doe"),
    statement_row("joe", "name", "Joe"),
    statement_row("ann", "name", "Ann", "enrich"),
)


def live_rows(folder: Path, hidden: bool = False) -> list[dict[str, Any]]:
    return [
        row
        for batch in SourceStatements(DatasetDirectory(str(folder)), hidden).batches({})
        for row in batch.to_pylist()
    ]


def names(folder: Path, hidden: bool = False) -> list[tuple[str, str]]:
    return sorted((row["origin"], row["value"]) for row in live_rows(folder, hidden))


@pytest.mark.parametrize("table", ["statements", "entities/statements"])
def test_statement_is_live_if_its_newest_row_in_an_origin_is_not_deleted(tmp_path: Path, table: str):
    again, other = JANE | {"last_seen": moment(9), "first_seen": moment(9)}, JANE | {"origin": "enrich"}
    revived = JOE | {"first_seen": moment(20), "last_seen": moment(20)}
    flushes = [
        [JANE, JANE, JOE, ANN, other],
        [tombstone(ANN, 5), tombstone(other, 5)],
        [again, tombstone(JOE, 5)],
        [revived],
    ]

    write_with_inline_deletes(tmp_path, flushes, table)

    assert names(tmp_path) == [("crawl", "Jane Doe"), ("crawl", "Joe")]
    times = {row["value"]: (row["first_seen"], row["last_seen"]) for row in live_rows(tmp_path)}
    assert times["Jane Doe"] == (moment(0).replace(tzinfo=None), moment(9).replace(tzinfo=None))
    assert times["Joe"][1] == moment(20).replace(tzinfo=None)


def test_tombstone_with_the_timestamp_of_its_row_wins(tmp_path: Path):
    write_with_inline_deletes(tmp_path, [[tombstone(JANE, 0)], [JANE]])

    assert names(tmp_path) == []


def test_newer_rows_of_a_fragment_replace_older_ones(tmp_path: Path):
    def page(value: str, at: int, fragment: str) -> dict[str, Any]:
        return statement_row("jane", "name", value, at=at, fragment=fragment)

    flushes = [[page("a", 0, "1"), page("b", 0, "1"), page("c", 0, "2")], [page("b", 5, "1"), page("d", 5, "1")]]
    write_with_inline_deletes(tmp_path, flushes)

    assert names(tmp_path) == [("crawl", "b"), ("crawl", "c"), ("crawl", "d")]


def test_statement_with_two_roles_is_live_until_both_are_deleted(tmp_path: Path):
    one, two = JANE | {"role": "a"}, JANE | {"role": "b", "last_seen": moment(3)}
    write_with_inline_deletes(tmp_path, [[one, two], [tombstone(one, 5)]])

    source = SourceStatements(DatasetDirectory(str(tmp_path)))

    assert (names(tmp_path), source.roles()) == ([("crawl", "Jane Doe")], 3)


def test_only_the_newest_base_statement_of_an_origin_is_imported(tmp_path: Path):
    flushes = [
        [statement_row("jane", "id", "f" * 40)],
        [statement_row("jane", "id", "0" * 40, at=5)],
        [statement_row("jane", "id", "a" * 40, "enrich")],
    ]
    write_with_inline_deletes(tmp_path, flushes)

    assert names(tmp_path) == [("crawl", "0" * 40), ("enrich", "a" * 40)]


def test_liveness_and_times_come_from_the_translog(tmp_path: Path):
    again = JANE | {"last_seen": moment(9), "first_seen": moment(9)}
    write_with_translog(tmp_path, [[JANE, JOE, ANN], [again]], {JOE["id"]: 5})

    assert names(tmp_path) == [("crawl", "Jane Doe"), ("enrich", "Ann")]
    (jane,) = (row for row in live_rows(tmp_path) if row["entity_id"] == "jane")
    assert (jane["first_seen"], jane["last_seen"]) == (moment(0).replace(tzinfo=None), moment(9).replace(tzinfo=None))


def test_statements_hidden_by_the_translog_are_counted_and_imported_on_request(tmp_path: Path):
    again = JOE | {"last_seen": moment(9)}
    write_with_translog(tmp_path, [[JANE, JOE, ANN], [again]], {JOE["id"]: 5, ANN["id"]: 5})
    unlisted = statement_row("old", "name", "Older than the translog")
    write_with_translog(tmp_path / "other", [[unlisted]], {})
    directory = DatasetDirectory(str(tmp_path))
    _append_unlisted(tmp_path / "other/entities/statements", tmp_path / "entities/statements")

    hidden = SourceStatements(directory).hidden()

    assert (hidden.unlisted, hidden.rewritten) == (1, 1)
    assert names(tmp_path) == [("crawl", "Jane Doe")]
    assert names(tmp_path, hidden=True) == [
        ("crawl", "Jane Doe"),
        ("crawl", "Joe"),
        ("crawl", "Older than the translog"),
    ]


def test_rows_with_equal_identity_in_tarn_are_imported_as_one_statement(tmp_path: Path):
    renamed = JANE | {"id": "0" * 40, "dataset": "another", "last_seen": moment(7), "schema": "LegalEntity"}
    german, external = (
        statement_row("jane", "name", "Jane Doe", lang="deu"),
        statement_row("jane", "name", "Jane Doe", external=True),
    )
    write_with_inline_deletes(tmp_path, [[JANE, renamed, german, external]])

    counts = SourceStatements(DatasetDirectory(str(tmp_path))).count()

    assert (counts.statements, counts.entities, counts.origins) == (3, 1, {"crawl": (3, 1)})
    assert {row["schema"] for row in live_rows(tmp_path) if row["lang"] is None and not row["external"]} == {
        "LegalEntity"
    }


def test_canonical_ids_original_values_and_odd_origins_are_kept(tmp_path: Path):
    row = statement_row("jane", "name", "Jane", "mapping:abc", canonical_id="Q1", original_value="JANE")
    write_with_inline_deletes(
        tmp_path, [[row], [statement_row("joe", "name", "Joe", "50% café")]], "entities/statements"
    )

    rows = {row["entity_id"]: row for row in live_rows(tmp_path)}

    assert (rows["jane"]["canonical_id"], rows["jane"]["original_value"]) == ("Q1", "JANE")
    assert [row["origin"] for _, row in sorted(rows.items())] == ["mapping:abc", "50% café"]


def test_table_with_unknown_or_missing_columns_is_refused(tmp_path: Path):
    from deltalake import DeltaTable, write_deltalake

    write_with_inline_deletes(tmp_path, [[JANE]])
    table = DeltaTable(str(tmp_path / "statements")).to_pyarrow_table()
    write_deltalake(str(tmp_path / "later/statements"), table.append_column("valid_to", table["last_seen"]))

    with pytest.raises(Misuse, match="unknown layout: it has the additional columns valid_to"):
        SourceStatements(DatasetDirectory(str(tmp_path / "later")))
    write_deltalake(str(tmp_path / "poor/statements"), table.drop_columns(["prop", "origin"]))
    with pytest.raises(Misuse, match="lacks the columns origin, prop"):
        SourceStatements(DatasetDirectory(str(tmp_path / "poor")))


def test_damaged_table_is_refused_with_the_reason(tmp_path: Path):
    write_with_inline_deletes(tmp_path, [[JANE], [JOE]])
    first, second = sorted((tmp_path / "statements").rglob("*.parquet"))
    content = first.read_bytes()

    first.unlink()
    with pytest.raises(Misuse, match="1 of 2 files that the Delta log names are missing"):
        SourceStatements(DatasetDirectory(str(tmp_path)))
    first.write_bytes(content[: len(content) // 2])
    with pytest.raises(Misuse, match="cannot be read"):
        SourceStatements(DatasetDirectory(str(tmp_path))).count()
    log = tmp_path / "statements/_delta_log/00000000000000000000.json"
    log.write_text("{")
    with pytest.raises(Misuse, match="its log is damaged"):
        SourceStatements(DatasetDirectory(str(tmp_path)))
    assert second.exists()


def test_directories_of_lakes_and_datasets_are_distinguished(tmp_path: Path):
    write_with_inline_deletes(tmp_path / "lake/one", [[JANE]])
    (tmp_path / "lake/two").mkdir()
    (tmp_path / "lake/two/config.yml").write_text("name: second\n")
    (tmp_path / "lake/config.yml").write_text("title: A lake\n")
    (tmp_path / "lake/versions").mkdir()

    assert [directory.name() for directory in find_datasets(str(tmp_path / "lake"))] == ["one", "second"]
    assert [directory.name() for directory in find_datasets(str(tmp_path / "lake/one"))] == ["one"]
    with pytest.raises(Misuse, match="not a directory of ftm-lakehouse"):
        find_datasets(str(tmp_path))
    (tmp_path / "lake/lake.json").write_text("{}")
    with pytest.raises(Misuse, match="is a lake of Tarn"):
        find_datasets(str(tmp_path / "lake"))


def _append_unlisted(other: Path, table: Path) -> None:
    """Append another table's rows, which are then not in the translog, as if an older version had written them."""
    from deltalake import DeltaTable, write_deltalake

    write_deltalake(str(table), DeltaTable(str(other)).to_pyarrow_table(), mode="append")
