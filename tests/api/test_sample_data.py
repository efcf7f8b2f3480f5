"""Published files of FtM entities, loaded over HTTP: their statements have the ids that FtM computes.

`SAMPLE_DATA` names a folder of such files (`*.ftm.json`, `*.ijson`); without it these cases are skipped.
"""

import os
from pathlib import Path

import orjson
import pytest
from followthemoney.dataset import Dataset
from followthemoney.statement.entity import StatementEntity

from tests.in_process_api import ONE_DATABASE, InProcessApi

pytestmark = ONE_DATABASE

FOLDER = os.environ.get("SAMPLE_DATA")
FILES = sorted(path for path in Path(FOLDER or ".").iterdir() if FOLDER and path.name.endswith(("ftm.json", "ijson")))


@pytest.mark.skipif(FOLDER is None, reason="SAMPLE_DATA names no folder of FtM files")
@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
@pytest.mark.parametrize(
    ("kind", "cleaned"), [("application/json+ftm", True), ("application/x-ndjson", False)], ids=["as_is", "clean"]
)
def test_statement_ids_of_a_file_are_those_of_ftm(api: InProcessApi, file: Path, kind: str, cleaned: bool):
    api.dataset("sample")
    entities = [orjson.loads(line) for line in file.read_bytes().splitlines()]
    dataset = Dataset({"name": "sample", "title": "Sample"})
    built = (StatementEntity(dataset, entity, cleaned=cleaned) for entity in entities)
    expected = {statement.id for entity in built for statement in entity.statements}
    headers = {"Content-Type": kind}
    response = api.admin.post("/v1/datasets/sample/entities", content=file.read_bytes(), headers=headers).json()
    stream = api.admin.get("/v1/datasets/sample/statements/stream").content
    assert {orjson.loads(line)["id"] for line in stream.splitlines()} == expected
    assert (response["entities"], response["rejected"]) == (len(entities), 0)
