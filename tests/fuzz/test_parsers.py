"""The parsers of bodies, fuzzed in a real child process: mutated files of every format, and random documents.

Every record of a body is stored or reported, or the body is refused with a 4xx status, within bounded time and memory,
and the next body is read. `make fuzz` runs `FORMAT_CASES` of each kind; `FUZZ_SEED` repeats a run. The files of the
folder that `SAMPLE_DATA` names are mutated as well.
"""

import io
import json
import os
import random
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from followthemoney.dataset import Dataset
from followthemoney.statement.entity import StatementEntity
from followthemoney.statement.serialize import get_statement_writer
from followthemoney.statement.statement import Statement
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from tarn.errors import TarnError
from tarn.journal.parsing.event_chunks import ReadOptions
from tarn.journal.parsing.parser_pool import ParserPool
from tarn.model.names import DatasetName

pytestmark = pytest.mark.xdist_group("fuzz")

CASES = int(os.environ.get("FORMAT_CASES", "40"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
SAMPLES = os.environ.get("SAMPLE_DATA")

MEMORY = 400 << 20
MAX_SECONDS = 30.0
"""Time limit of a case, more than ten times what any takes on an idle machine."""
REFUSED = frozenset({400, 413, 415, 422})
"""The statuses with which a body may be refused."""

Records = Literal["entities", "statements"]


class Format(NamedTuple):
    records: Records
    media_type: str


FORMATS = (
    Format("entities", "application/x-ndjson"),
    Format("entities", "application/json+ftm"),
    Format("entities", "application/json"),
    Format("statements", "application/x-ndjson"),
    Format("statements", "application/json"),
    Format("statements", "text/csv"),
    Format("statements", "application/x-ftm-pack"),
    Format("statements", "application/vnd.apache.parquet"),
    Format("statements", "application/vnd.apache.arrow.stream"),
)


@pytest.fixture(scope="module")
def parsers() -> Iterator[ParserPool]:
    with closing(ParserPool(1, memory=MEMORY, wait=120)) as parsers:
        yield parsers


@pytest.fixture(scope="module")
def samples() -> dict[Format, list[bytes]]:
    """Return files of each format, as written by FtM's tools and by Tarn."""
    entities = [ENTITIES]
    if SAMPLES is not None:
        paths = sorted(path for path in Path(SAMPLES).iterdir() if path.name.endswith(("ftm.json", "ijson")))
        entities += [[json.loads(line) for line in path.read_bytes().splitlines()[:40]] for path in paths]
    files: dict[Format, list[bytes]] = {form: [] for form in FORMATS}
    for each in entities:
        for form, body in _serialized(each).items():
            files[form].append(body)
    return files


ENTITIES: list[dict[str, Any]] = [
    {"id": "jane", "schema": "Person", "properties": {"name": ["Jane Döe"], "country": ["de"], "birthDate": ["1970"]}},
    {"id": "acme", "schema": "Company", "properties": {"name": ["Acme 株式会社"], "website": ["https://acme.org/"]}},
    {"id": "own", "schema": "Ownership", "properties": {"owner": ["jane"], "asset": ["acme"]}, "referents": ["o1"]},
    {"id": "doc", "schema": "Document", "properties": {"mimeType": ["text/plain"], "bodyText": ["x" * 5000]}},
]
CHANGES = [{"op": "MOD", "entity": ENTITIES[0]}, {"op": "DEL", "entity": {"id": "acme"}}]


def _serialized(entities: list[dict[str, Any]]) -> dict[Format, bytes]:
    dataset = Dataset({"name": "test", "title": "Test"})
    statements = [one for entity in entities for one in StatementEntity(dataset, entity, cleaned=True).statements]
    rows = [dict(one.to_dict()) for one in statements]
    lines = b"".join(json.dumps(one).encode() + b"\n" for one in [*entities, *CHANGES])
    csv, pack, ndjson = (_by_ftm(statements, form) for form in ("csv", "pack", "json"))
    table, columns, stream = pa.Table.from_pylist(rows), io.BytesIO(), io.BytesIO()
    parquet.write_table(table, columns, compression="zstd", row_group_size=20)
    with pa.ipc.new_stream(stream, table.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writing:
        writing.write_table(table, 20)
    bodies = [lines, lines, json.dumps(entities).encode(), ndjson, json.dumps(rows).encode(), csv, pack]
    return dict(zip(FORMATS, [*bodies, columns.getvalue(), stream.getvalue()], strict=True))


def _by_ftm(statements: list[Statement], form: str) -> bytes:
    file = io.BytesIO()
    writer = get_statement_writer(file, form)
    for one in statements:
        writer.write(one)
    writer.close()
    return file.getvalue()


def _mutated(chance: random.Random, body: bytes) -> bytes:
    """Return a body with a few random changes of the kinds that break parsers."""
    data = bytearray(body)
    for _ in range(chance.choice((0, 1, 1, 2, 4, 16))):
        place, width = chance.randrange(len(data) + 1), chance.choice((1, 1, 4, 8, 64, 1000))
        kind = chance.randrange(7)
        if kind == 0:
            data[place : place + width] = chance.randbytes(width)
        elif kind == 1:
            del data[place : place + width]
        elif kind == 2:
            data[place:place] = data[place : place + width] * chance.choice((1, 2, 50))
        elif kind == 3 and place < len(data):
            data[place] ^= 1 << chance.randrange(8)
        elif kind == 4:
            data[place : place + width] = chance.choice((b"\xff", b"\x00", b"\x7f", b"\x80")) * width
        elif kind == 5:
            data[place:place] = chance.choice((b'"', b"\n", b"\x00", b"[" * 2000, b"{", b"9" * 5000, b"\xf0\x9f", b","))
        else:
            other = chance.randrange(len(data) + 1)
            data[place:place] = data[other : other + width]
    return bytes(data[: chance.randrange(len(data) + 1)] if chance.random() < 0.1 else data)


def _read(parsers: ParserPool, form: Format, body: bytes, chance: random.Random) -> None:
    """Read one body. Fails unless each record is stored or reported, or the body is refused with a 4xx status."""
    options = ReadOptions(
        records=form.records,
        media_type=form.media_type,
        dataset=DatasetName("test"),
        origin=None,
        moment=1_700_000_000_000_000,
        longest=1 << 20,
        on_error=chance.choice(("abort", "skip", "drop")),
        values=chance.choice(("clean", "as_is")),
        strict=chance.random() < 0.1,
    )
    started = time.monotonic()
    try:
        with parsers.parser(options) as reading:
            rows = sum(len(chunk) for chunk in reading.chunks(io.BytesIO(body)))
    except TarnError as error:
        if error.status not in REFUSED:
            raise
    else:
        report = reading.report
        assert report.read == report.stored + report.rejected
        assert rows == reading.rows
        assert len(report.errors) <= report.rejected
        assert report.omitted.count == sum(report.omitted.by_property.values()) >= len(report.omitted.first)
    assert time.monotonic() - started < MAX_SECONDS


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: f"{form.records}-{form.media_type}")
def test_mutated_file_has_every_record_stored_or_reported_or_is_refused(
    parsers: ParserPool, samples: dict[Format, list[bytes]], form: Format
):
    for case in range(CASES):
        chance = random.Random(f"{SEED}-{form.media_type}-{form.records}-{case}")
        body = _mutated(chance, chance.choice(samples[form]))
        try:
            _read(parsers, form, body, chance)
        except BaseException as error:
            error.add_note(f"FUZZ_SEED={SEED}, case {case}: {body[:200]!r}… of {len(body)} bytes")
            raise


TEXT = st.text(max_size=40) | st.sampled_from(["id", "a", "Person", "ADD", "DEL", "name", "country", "owner", "\x00"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=5),
    max_leaves=20,
)
ENTITY = st.fixed_dictionaries(
    {"id": TEXT | JSON, "schema": st.sampled_from(["Person", "Company", "Ownership", "Document", "Banana"]) | JSON},
    optional={
        "properties": JSON
        | st.dictionaries(
            st.sampled_from(["name", "country", "owner", "parent", "ownershipOwner", "mimeType", "birthDate", "x"]),
            JSON | st.lists(TEXT, max_size=4),
            max_size=5,
        ),
        "referents": JSON,
        "first_seen": JSON,
        "op": JSON,
        "entity": JSON,
    },
)
STATEMENT = st.dictionaries(
    st.sampled_from(
        ["id", "entity_id", "canonical_id", "prop", "schema", "value", "lang", "external", "first_seen", "x"]
    ),
    JSON,
)


@seed(SEED)
@settings(max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(
    form=st.sampled_from(FORMATS[:5]),
    records=st.lists(ENTITY | STATEMENT | JSON, max_size=6),
    chance=st.integers(0, 1 << 30).map(random.Random),
)
def test_random_document_has_every_record_stored_or_reported_or_is_refused(parsers, form, records, chance):
    body = json.dumps(records).encode() if form.media_type == "application/json" else b""
    body = body or b"\n".join(json.dumps(record).encode() for record in records)
    _read(parsers, form, body, chance)
