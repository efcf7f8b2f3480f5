"""The whole OpenAPI document, fuzzed as each role: no 500, no undeclared status, and no response of another schema.

`FUZZ_EXAMPLES` sets the number of examples for each route and `FUZZ_SEED` the seed; `make fuzz` runs many.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import copied_postgresql
from tests.isolation.prepared_lake import LEVELS, prepare_lake
from tests.server import Server, clean_environment, running

pytestmark = pytest.mark.xdist_group("fuzz")

HERE = Path(__file__).parent
EXAMPLES = os.environ.get("FUZZ_EXAMPLES", "1")
SEED = os.environ.get("FUZZ_SEED", "1")
PHASES = os.environ.get("FUZZ_PHASES", "fuzzing,stateful")
DOCUMENT = "openapi.json"
ADMIN_KEY = "the-key-of-the-administrator"


@pytest.fixture(scope="module")
def keys() -> dict[str, str]:
    """Return the API key of each role; the fixture `lake` adds those of its tenants."""
    return {"anonymous": "", "administrator": ADMIN_KEY}


@pytest.fixture(scope="module")
def database(postgresql: str) -> Iterator[str]:
    """Return the URL of a PostgreSQL database: it rejects more values than SQLite."""
    with copied_postgresql(postgresql) as url:
        yield url


@pytest.fixture(scope="module")
def lake(
    tmp_path_factory: pytest.TempPathFactory, database: str, kernel_process: ProcessPoolExecutor, keys: dict[str, str]
) -> Iterator[Server]:
    """Start an API process on a prepared lake, without a worker."""
    folder = tmp_path_factory.mktemp("fuzz")
    with prepare_lake(folder, database, kernel_process) as prepared:
        keys.update({role: str(prepared.callers[role].key) for role in LEVELS})
    with running(
        folder,
        "api",
        TARN_DATABASE_URL=database,
        TARN_LAKE_URI=str(folder / "lake"),
        TARN_ADMIN_KEY=ADMIN_KEY,
        TARN_COMMIT_WAIT="0.01",
        TARN_FETCH_TIMEOUT="0.2",
        TARN_FETCH_MAX_SECONDS="1",
        TARN_EVENT_MAX_SECONDS="0.1",
    ) as server:
        # Schemathesis waits only ten seconds for the document, which is too short on a busy machine.
        (folder / DOCUMENT).write_text(server.client(ADMIN_KEY).get("/openapi.json").text)
        yield server


@pytest.mark.parametrize(
    "role", [*(pytest.param(role, marks=pytest.mark.long) for role in ("anonymous", *LEVELS)), "administrator"]
)
def test_fuzzed_requests_get_responses_that_match_the_openapi_document(
    lake: Server, keys: dict[str, str], role: str, tmp_path: Path
):
    command = [f"{Path(sys.executable).parent}/schemathesis", "--config-file", f"{HERE}/schemathesis.toml", "run"]
    options = ["--phases", PHASES, "--max-examples", EXAMPLES, "--seed", SEED, "--no-shrink"]
    header = ["--header", f"Authorization:Bearer {keys[role]}"] if keys[role] else []
    result = subprocess.run(
        [*command, str(lake.folder / DOCUMENT), "--url", lake.url, *options, *header],
        cwd=tmp_path,
        env=clean_environment(SCHEMATHESIS_HOOKS="tests.fuzz.hooks", PYTHONPATH=str(HERE.parents[1])),
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 0, result.stdout + result.stderr
    assert "unexpected error" not in lake.log.read_text()
