"""Files from the command line: put, listed, fetched, removed."""

import hashlib
from pathlib import Path

import pytest
from typer.testing import Result

from tests.cli.conftest import Tarn


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Create a folder with files and a subfolder."""
    (tmp_path / "scans" / "deep").mkdir(parents=True)
    (tmp_path / "scans" / "b.txt").write_text("second")
    (tmp_path / "scans" / "a.txt").write_text("first")
    (tmp_path / "scans" / "deep" / "報告.pdf").write_bytes(b"%PDF-1.4 \x00\xff")
    return tmp_path / "scans"


def listed(tarn: Tarn, *args: str) -> list[str]:
    return [file["path"] for file in tarn.json("files", "ls", *args)]


def test_folder_is_put_with_its_subfolders(tarn: Tarn, dataset: str, folder: Path):
    done = tarn("files", "put", dataset, str(folder), "--prefix", "2024/", "--origin", "scan", "--entity")

    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        "path",
        "2024/a.txt",
        "2024/b.txt",
        "2024/deep/報告.pdf",
    ]
    assert listed(tarn, dataset) == ["2024/a.txt", "2024/b.txt", "2024/deep/報告.pdf"]
    assert listed(tarn, dataset, "2024/d") == ["2024/deep/報告.pdf"]
    assert listed(tarn, dataset, "--limit", "1") == ["2024/a.txt"]
    entities = tarn("entities", "query", dataset, "--schemata", "Document").stdout
    assert (entities.count('"Folder"'), entities.count('"Pages"'), entities.count('"PlainText"')) == (2, 1, 2)


def test_file_is_fetched_by_path_and_by_checksum(tarn: Tarn, dataset: str, folder: Path, tmp_path: Path):
    tarn("files", "put", dataset, str(folder))
    checksum = hashlib.sha256(b"first").hexdigest()

    assert tarn("files", "get", dataset, "a.txt").stdout == "first"
    assert tarn("files", "get", dataset, checksum).stdout == "first"
    tarn("files", "get", dataset, "deep/報告.pdf", "-o", str(tmp_path / "out.pdf"))

    assert (tmp_path / "out.pdf").read_bytes() == b"%PDF-1.4 \x00\xff"


def test_path_that_was_put_twice_has_the_last_content(tarn: Tarn, dataset: str):
    tarn("files", "put", dataset, "-", "--path", "a/b.txt", stdin="one")
    tarn("files", "put", dataset, "-", "--path", "a/b.txt", stdin="two")

    assert tarn("files", "get", dataset, "a/b.txt").stdout == "two"
    assert len(listed(tarn, dataset)) == 2


def test_wrong_checksum_and_invalid_path_are_problems(tarn: Tarn, dataset: str):
    wrong = tarn("files", "put", dataset, "-", "--path", "a", "--checksum", "0" * 64, code=1, stdin="one")
    bad = tarn("files", "put", dataset, "-", "--path", "../a", code=1, stdin="one")

    assert "(schema-violation)" in wrong.stderr
    assert "(invalid-path)" in bad.stderr
    assert listed(tarn, dataset) == []


def test_empty_file_is_put_and_fetched(tarn: Tarn, dataset: str, tmp_path: Path):
    (tmp_path / "empty.csv").touch()

    tarn("files", "put", dataset, str(tmp_path / "empty.csv"))
    tarn("files", "get", dataset, "empty.csv", "-o", str(tmp_path / "fetched.csv"))

    assert listed(tarn, dataset) == ["empty.csv"]
    assert (tmp_path / "fetched.csv").read_bytes() == b""


def test_number_of_files_uploaded_before_a_failure_is_reported(tarn: Tarn, dataset: str, folder: Path):
    (folder / "a\\0.txt").touch()

    failed = tarn("files", "put", dataset, str(folder), code=1)

    assert "1 files were uploaded; the others were not" in failed.stderr
    assert "(invalid-path)" in failed.stderr
    assert listed(tarn, dataset) == ["a.txt"]


def test_metadata_of_a_file_is_stored(tarn: Tarn, dataset: str, folder: Path):
    done = tarn.json("files", "put", dataset, str(folder / "a.txt"), "--meta", '{"Straße": [1, null]}')

    assert [file["meta"] for file in done] == [{"Straße": [1, None]}]


def test_put_fails_if_its_precondition_does_not_hold(tarn: Tarn, dataset: str):
    def put(content: str, *args: str, code: int = 0) -> Result:
        return tarn("files", "put", dataset, "-", "--path", "a", *args, stdin=content, code=code)

    put("one", "--if-none-match", "*")
    assert "(precondition-failed)" in put("two", "--if-none-match", "*", code=1).stderr
    assert "(precondition-failed)" in put("two", "--if-match", "0" * 64, code=1).stderr
    assert len(listed(tarn, dataset)) == 1
    put("two", "--if-match", hashlib.sha256(b"one").hexdigest())
    assert len(listed(tarn, dataset)) == 2


def test_preconditions_and_metadata_of_a_fetch_are_sent_to_the_server(tarn: Tarn, dataset: str):
    tarn("files", "put", dataset, "-", "--path", "a", stdin="one")

    existing = tarn("files", "fetch", dataset, "gopher://example.org/", "--path", "a", "--if-none-match", "*", code=1)
    different = tarn("files", "fetch", dataset, "gopher://example.org/", "--path", "a", "--if-match", "x", code=1)
    large = tarn("files", "fetch", dataset, "gopher://example.org/", "--meta", '{"a":' * 65 + "1" + "}" * 65, code=1)

    assert "(precondition-failed)" in existing.stderr
    assert "(precondition-failed)" in different.stderr
    assert "meta" in large.stderr


@pytest.mark.parametrize(
    "args",
    [
        ("put", "-"),
        ("put", "-", "--path", "a", "--meta", "{"),
        ("put", "-", "--path", "a", "--meta", "[1]"),
        ("fetch", "https://example.org/", "--meta", "null"),
        ("put", "/nowhere"),
        ("put", "a", "b", "--path", "x"),
        ("get", "nothing"),
        ("rm", "nothing"),
        ("rm", "-r", "nothing"),
    ],
)
def test_misuse_is_refused_before_anything_is_changed(tarn: Tarn, dataset: str, args: tuple[str, ...]):
    command, *rest = args

    assert tarn("files", command, dataset, *rest, code=2).stderr.startswith("tarn: ")


def test_files_are_removed_by_path_and_by_folder(tarn: Tarn, dataset: str, folder: Path):
    tarn("files", "put", dataset, str(folder))
    tarn("files", "put", dataset, str(folder), "--prefix", "deeper")

    assert tarn.json("files", "rm", dataset, "a.txt", "b.txt") == {"files": 2}
    refused = tarn("files", "rm", dataset, "-r", "deeper", code=2, stdin="")
    assert "give --yes" in refused.stderr
    assert tarn.json("files", "rm", dataset, "-r", "deeper", "--yes") == {"files": 3}

    assert listed(tarn, dataset) == ["deep/報告.pdf"]


def test_unsupported_scheme_of_an_address_is_a_problem(tarn: Tarn, dataset: str):
    assert "only http, https" in tarn("files", "fetch", dataset, "gopher://example.org/", code=1).stderr
    assert "only http, https" in tarn("crawl", dataset, "gopher://example.org/", code=1).stderr


def test_crawl_of_a_forbidden_address_fails_with_the_reason(tarn: Tarn, dataset: str):
    done = tarn("crawl", dataset, "http://127.0.0.1:9/", "--glob", "*.pdf", "--quiet", code=1)

    assert "not at a public address" in done.stderr
