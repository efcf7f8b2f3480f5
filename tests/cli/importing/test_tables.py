"""Which statements of a lakehouse are live."""

from pathlib import Path
from typing import Any

import pytest
from tarn.cli.failures import Misuse
from tarn.cli.importing.layouts import DatasetDirectory, find_datasets
from tarn.cli.importing.tables import SourceStatements

from tests.cli.importing.lakes import deleted, moment, said, with_deletes_inline, with_translog

JANE, JOE, ANN = said("jane", "name", "Jane Doe"), said("joe", "name", "Joe"), said("ann", "name", "Ann", "enrich")


def live(folder: Path, hidden: bool = False) -> list[dict[str, Any]]:
    return [
        row
        for batch in SourceStatements(DatasetDirectory(str(folder)), hidden).batches({})
        for row in batch.to_pylist()
    ]


def names(folder: Path, hidden: bool = False) -> list[tuple[str, str]]:
    return sorted((row["origin"], row["value"]) for row in live(folder, hidden))


@pytest.mark.parametrize("table", ["statements", "entities/statements"])
def test_newest_row_of_a_statement_and_origin_decides(tmp_path: Path, table: str):
    again, other = JANE | {"last_seen": moment(9), "first_seen": moment(9)}, JANE | {"origin": "enrich"}
    revived = JOE | {"first_seen": moment(20), "last_seen": moment(20)}
    flushes = [[JANE, JANE, JOE, ANN, other], [deleted(ANN, 5), deleted(other, 5)], [again, deleted(JOE, 5)], [revived]]

    with_deletes_inline(tmp_path, flushes, table)

    assert names(tmp_path) == [("crawl", "Jane Doe"), ("crawl", "Joe")]
    times = {row["value"]: (row["first_seen"], row["last_seen"]) for row in live(tmp_path)}
    assert times["Jane Doe"] == (moment(0).replace(tzinfo=None), moment(9).replace(tzinfo=None))
    assert times["Joe"][1] == moment(20).replace(tzinfo=None)


def test_tombstone_as_new_as_what_it_ends_wins(tmp_path: Path):
    with_deletes_inline(tmp_path, [[deleted(JANE, 0)], [JANE]])

    assert names(tmp_path) == []


def test_later_fragment_takes_the_place_of_an_earlier_one(tmp_path: Path):
    def page(value: str, at: int, fragment: str) -> dict[str, Any]:
        return said("jane", "name", value, at=at, fragment=fragment)

    flushes = [[page("a", 0, "1"), page("b", 0, "1"), page("c", 0, "2")], [page("b", 5, "1"), page("d", 5, "1")]]
    with_deletes_inline(tmp_path, flushes)

    assert names(tmp_path) == [("crawl", "b"), ("crawl", "c"), ("crawl", "d")]


def test_statement_of_two_roles_is_one_until_both_have_deleted_it(tmp_path: Path):
    one, two = JANE | {"role": "a"}, JANE | {"role": "b", "last_seen": moment(3)}
    with_deletes_inline(tmp_path, [[one, two], [deleted(one, 5)]])

    source = SourceStatements(DatasetDirectory(str(tmp_path)))

    assert (names(tmp_path), source.roles()) == ([("crawl", "Jane Doe")], 3)


def test_of_base_statements_the_newest_is_taken(tmp_path: Path):
    flushes = [
        [said("jane", "id", "f" * 40)],
        [said("jane", "id", "0" * 40, at=5)],
        [said("jane", "id", "a" * 40, "enrich")],
    ]
    with_deletes_inline(tmp_path, flushes)

    assert names(tmp_path) == [("crawl", "0" * 40), ("enrich", "a" * 40)]


def test_translog_says_what_is_shown_and_when_it_was_seen(tmp_path: Path):
    again = JANE | {"last_seen": moment(9), "first_seen": moment(9)}
    with_translog(tmp_path, [[JANE, JOE, ANN], [again]], {JOE["id"]: 5})

    assert names(tmp_path) == [("crawl", "Jane Doe"), ("enrich", "Ann")]
    (jane,) = (row for row in live(tmp_path) if row["entity_id"] == "jane")
    assert (jane["first_seen"], jane["last_seen"]) == (moment(0).replace(tzinfo=None), moment(9).replace(tzinfo=None))


def test_what_the_translog_hides_is_counted_and_taken_on_request(tmp_path: Path):
    again = JOE | {"last_seen": moment(9)}
    with_translog(tmp_path, [[JANE, JOE, ANN], [again]], {JOE["id"]: 5, ANN["id"]: 5})
    unlisted = said("old", "name", "Older than the translog")
    with_translog(tmp_path / "other", [[unlisted]], {})
    place = DatasetDirectory(str(tmp_path))
    _adopt(tmp_path / "other/entities/statements", tmp_path / "entities/statements")

    hidden = SourceStatements(place).hidden()

    assert (hidden.unlisted, hidden.rewritten) == (1, 1)
    assert names(tmp_path) == [("crawl", "Jane Doe")]
    assert names(tmp_path, hidden=True) == [
        ("crawl", "Jane Doe"),
        ("crawl", "Joe"),
        ("crawl", "Older than the translog"),
    ]


def test_rows_that_tarn_takes_for_one_are_one(tmp_path: Path):
    renamed = JANE | {"id": "0" * 40, "dataset": "another", "last_seen": moment(7), "schema": "LegalEntity"}
    german, external = said("jane", "name", "Jane Doe", lang="deu"), said("jane", "name", "Jane Doe", external=True)
    with_deletes_inline(tmp_path, [[JANE, renamed, german, external]])

    counts = SourceStatements(DatasetDirectory(str(tmp_path))).count()

    assert (counts.statements, counts.entities, counts.origins) == (3, 1, {"crawl": (3, 1)})
    assert {row["schema"] for row in live(tmp_path) if row["lang"] is None and not row["external"]} == {"LegalEntity"}


def test_canonical_ids_original_values_and_odd_origins_are_kept(tmp_path: Path):
    row = said("jane", "name", "Jane", "mapping:abc", canonical_id="Q1", original_value="JANE")
    with_deletes_inline(tmp_path, [[row], [said("joe", "name", "Joe", "50% café")]], "entities/statements")

    kept = {row["entity_id"]: row for row in live(tmp_path)}

    assert (kept["jane"]["canonical_id"], kept["jane"]["original_value"]) == ("Q1", "JANE")
    assert [row["origin"] for _, row in sorted(kept.items())] == ["mapping:abc", "50% café"]


def test_table_with_columns_that_nobody_knows_is_refused(tmp_path: Path):
    from deltalake import DeltaTable, write_deltalake

    with_deletes_inline(tmp_path, [[JANE]])
    table = DeltaTable(str(tmp_path / "statements")).to_pyarrow_table()
    write_deltalake(str(tmp_path / "later/statements"), table.append_column("valid_to", table["last_seen"]))

    with pytest.raises(Misuse, match="unknown layout: it has the additional columns valid_to"):
        SourceStatements(DatasetDirectory(str(tmp_path / "later")))
    write_deltalake(str(tmp_path / "poor/statements"), table.drop_columns(["prop", "origin"]))
    with pytest.raises(Misuse, match="lacks the columns origin, prop"):
        SourceStatements(DatasetDirectory(str(tmp_path / "poor")))


def test_damage_is_told_precisely(tmp_path: Path):
    with_deletes_inline(tmp_path, [[JANE], [JOE]])
    first, second = sorted((tmp_path / "statements").rglob("*.parquet"))
    kept = first.read_bytes()

    first.unlink()
    with pytest.raises(Misuse, match="1 of 2 files that the Delta log names are missing"):
        SourceStatements(DatasetDirectory(str(tmp_path)))
    first.write_bytes(kept[: len(kept) // 2])
    with pytest.raises(Misuse, match="cannot be read"):
        SourceStatements(DatasetDirectory(str(tmp_path))).count()
    log = tmp_path / "statements/_delta_log/00000000000000000000.json"
    log.write_text("{")
    with pytest.raises(Misuse, match="its log is damaged"):
        SourceStatements(DatasetDirectory(str(tmp_path)))
    assert second.exists()


def test_directories_are_told_apart(tmp_path: Path):
    with_deletes_inline(tmp_path / "lake/one", [[JANE]])
    (tmp_path / "lake/two").mkdir()
    (tmp_path / "lake/two/config.yml").write_text("name: second\n")
    (tmp_path / "lake/config.yml").write_text("title: A lake\n")
    (tmp_path / "lake/versions").mkdir()

    assert [place.name() for place in find_datasets(str(tmp_path / "lake"))] == ["one", "second"]
    assert [place.name() for place in find_datasets(str(tmp_path / "lake/one"))] == ["one"]
    with pytest.raises(Misuse, match="not a directory of ftm-lakehouse"):
        find_datasets(str(tmp_path))
    (tmp_path / "lake/lake.json").write_text("{}")
    with pytest.raises(Misuse, match="is a lake of Tarn"):
        find_datasets(str(tmp_path / "lake"))


def _adopt(other: Path, table: Path) -> None:
    """Append another table's rows, as a version that knew no translog would have left them."""
    from deltalake import DeltaTable, write_deltalake

    write_deltalake(str(table), DeltaTable(str(other)).to_pyarrow_table(), mode="append")
