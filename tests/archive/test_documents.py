"""Entities that describe files for FtM tools."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from followthemoney import model
from followthemoney.dataset import Dataset
from followthemoney.statement import StatementEntity
from tarn.archive import documents
from tarn.archive.documents import schema_of
from tarn.archive.mime import NAMES, SIGNATURES
from tarn.model.file import ArchiveFile, file_id
from tarn.model.ftm.entity import Exploder
from tarn.model.ids import now
from tarn.model.names import Checksum, DatasetName, FilePath, Origin

TEST = DatasetName("test")


def file(path: str = "a/b/report.pdf", mime_type: str = "application/pdf", dataset: DatasetName = TEST) -> ArchiveFile:
    checksum = Checksum("0f" * 32)
    return ArchiveFile(
        id=file_id(dataset, FilePath(path), checksum),
        checksum=checksum,
        sha1="0f" * 20,
        path=FilePath(path),
        name=FilePath(path).name,
        size=12,
        mime_type=mime_type,
        created=now(),
        tenant="admin",
        origin=Origin("crawl"),
        meta={},
    )


@pytest.mark.parametrize(
    ("mime_type", "schema"),
    [
        ("application/pdf", "Pages"),
        ("application/msword", "Pages"),
        (NAMES[".docx"], "Pages"),
        (NAMES[".pptx"], "Pages"),
        (NAMES[".odt"], "Pages"),
        ("application/rtf", "Pages"),
        ("application/epub+zip", "Pages"),
        ("text/html", "HyperText"),
        ("application/xhtml+xml", "HyperText"),
        ("application/xml", "HyperText"),
        ("text/csv", "Table"),
        ("text/tab-separated-values", "Table"),
        ("application/vnd.ms-excel", "Table"),
        (NAMES[".xlsx"], "Table"),
        (NAMES[".xlsb"], "Table"),
        (NAMES[".ods"], "Table"),
        ("image/png", "Image"),
        ("image/svg+xml", "Image"),
        ("message/rfc822", "Email"),
        ("application/vnd.ms-outlook", "Email"),
        ("text/plain", "PlainText"),
        ("text/markdown", "PlainText"),
        ("application/json", "PlainText"),
        ("application/yaml", "PlainText"),
        ("audio/mpeg", "Audio"),
        ("video/mp4", "Video"),
        ("application/zip", "Package"),
        ("application/gzip", "Package"),
        ("application/x-7z-compressed", "Package"),
        ("application/vnd.rar", "Package"),
        ("application/mbox", "Package"),
        ("application/vnd.ms-outlook-pst", "Package"),
        ("application/octet-stream", "Document"),
        ("application/x-elf", "Document"),
        ("nonsense", "Document"),
    ],
)
def test_schema_is_chosen_by_mime_type(mime_type: str, schema: str):
    assert schema_of(mime_type) == schema


def test_every_recognised_mime_type_has_a_document_schema():
    kinds = {kind for _, _, kind in SIGNATURES} | {*NAMES.values()}

    assert {model.get(schema_of(kind)).is_a("Document") for kind in kinds} == {True}


def test_document_has_the_fields_and_location_of_the_record():
    root, folder, document = documents.entities(TEST, file())

    assert document == {
        "id": file().id,
        "schema": "Pages",
        "properties": {
            "contentHash": ["0f" * 20],
            "fileName": ["report.pdf"],
            "fileSize": ["12"],
            "mimeType": ["application/pdf"],
            "parent": [folder["id"]],
        },
    }
    assert folder == {
        "id": documents.folder_id(TEST, FilePath("a/b")),
        "schema": "Folder",
        "properties": {"fileName": ["b"], "parent": [root["id"]]},
    }
    assert root["properties"] == {"fileName": ["a"]}


def test_file_without_a_folder_has_no_parent():
    (document,) = documents.entities(TEST, file("report.pdf"))

    assert "parent" not in document["properties"]


def test_ids_depend_only_on_dataset_path_and_content():
    assert documents.entities(TEST, file()) == documents.entities(TEST, file())
    others = [file("a/c/report.pdf"), file(dataset=DatasetName("other"))]
    assert len({file().id, *(other.id for other in others)}) == 3
    assert documents.folder_id(TEST, FilePath("a")) != documents.folder_id(DatasetName("other"), FilePath("a"))


def test_ftm_reads_the_entities_without_loss():
    for entity in documents.entities(TEST, file("報告/1.pdf")):
        read = StatementEntity.from_data(Dataset.make({"name": "test", "title": "T"}), entity)
        assert {name: read.get(name) for name in entity["properties"]} == entity["properties"]
        assert Exploder().explode(TEST, entity).values[:-1] == [
            value for values in entity["properties"].values() for value in values
        ]


def test_ftm_command_validates_the_entities(tmp_path: Path):
    lines = "".join(json.dumps(entity) + "\n" for entity in documents.entities(TEST, file()))
    (tmp_path / "in.json").write_text(lines)

    ftm = Path(sys.executable).parent / "ftm"
    subprocess.run([ftm, "validate", "-i", "in.json", "-o", "out.json"], cwd=tmp_path, check=True)

    read = [json.loads(line) for line in (tmp_path / "out.json").read_text().splitlines()]
    assert [entity["schema"] for entity in read] == ["Folder", "Folder", "Pages"]
