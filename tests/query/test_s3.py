"""Reads of a lake on a real S3 server: current credentials, and bounded, correct errors when the store fails."""

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from time import monotonic

import hypothesis
import pytest
from httpx2 import Response
from hypothesis import HealthCheck, given
from pydantic import SecretStr
from tarn.datasets.registry import Dataset
from tarn.errors import Unavailable
from tarn.main import build_services
from tarn.model.datasets.snapshot import Snapshot
from tarn.model.ids import now
from tarn.query import statements
from tarn.query.engine.engine import Engine, duckdb_errors_converted
from tarn.query.output.statement_formats import CSV
from tarn.query.reader import NOW
from tarn.query.statements import StatementFilter
from tarn.settings import Settings
from tarn.storage import connection as limits
from tarn.storage.connection import Connection
from tarn.storage.store import Store

from tests.in_process_api import InProcessApi
from tests.pipeline.kernels import DirectKernels
from tests.query.model import Step, histories
from tests.query.test_histories import check_history
from tests.s3 import ACCESS_KEY, SECRET_KEY, S3Server, s3_server

ENTITIES = "/v1/datasets/test/entities"

pytestmark = [pytest.mark.parametrize("database_url", ["sqlite"], indirect=True), pytest.mark.own_query_process]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[S3Server]:
    """Start a server of the test's own, which it may kill."""
    with s3_server(tmp_path / "s3") as server:
        yield server


@pytest.fixture
def settings(server: S3Server, database_url: str, tmp_path: Path) -> Settings:
    return server.settings(database_url=database_url, admin_key_file=tmp_path / "admin.key")


@pytest.fixture
def people(api: InProcessApi, flush: Callable[[], list[Snapshot]]) -> None:
    """Write Jane in one file, and John in another."""
    for name in ("jane", "john"):
        api.admin.post(ENTITIES, {"id": name, "schema": "Person", "properties": {"name": [name]}})
        flush()


def read(api: InProcessApi, entity_id: str) -> Response:
    return api.admin.get(f"{ENTITIES}/{entity_id}")


@pytest.mark.long
@hypothesis.settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(history=histories)
def test_every_read_after_any_history_is_the_same_on_s3_as_on_a_disk(
    api: InProcessApi, kernels: DirectKernels, history: list[Step]
):
    check_history(api, kernels, history)


# Credentials

SetCredentials = Callable[[str, str], None]


@pytest.fixture
def strict(server: S3Server) -> None:
    if not server.strict:
        pytest.skip("versitygw is not built here, and moto's server checks no signature")


@pytest.fixture
def set_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SetCredentials:
    """Return a function that changes the ambient credentials of this process, which are fetched for every use."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    keys, config = tmp_path / "keys.json", tmp_path / "config"
    config.write_text(f"[default]\ncredential_process = cat {keys}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))

    def set_credentials(key: str, secret: str) -> None:
        soon = (now() + timedelta(minutes=5)).isoformat()
        document = {"Version": 1, "AccessKeyId": key, "SecretAccessKey": secret, "Expiration": soon}
        written = tmp_path / "keys.new"
        written.write_text(json.dumps(document))
        written.replace(keys)

    return set_credentials


@pytest.fixture
def ambient_settings(server: S3Server, settings: Settings) -> Settings:
    """Return settings for the same lake with the ambient identity of this process."""
    return settings.model_copy(
        update={"storage_options": {"aws_endpoint": SecretStr(server.endpoint), "aws_region": SecretStr("us-east-1")}}
    )


def test_read_uses_current_credentials_and_never_shows_bad_ones(
    strict: None,
    api: InProcessApi,
    ambient_settings: Settings,
    people: None,
    set_credentials: SetCredentials,
    capsys: pytest.CaptureFixture[str],
):
    set_credentials(ACCESS_KEY, SECRET_KEY)
    store = Store(Connection.from_settings(ambient_settings))
    with InProcessApi(build_services(ambient_settings, api.services.database, store), str(api.admin.key)) as other:
        good = read(other, "jane")
        set_credentials(ACCESS_KEY, "an-expired-secret")
        bad = read(other, "john")
        set_credentials(ACCESS_KEY, SECRET_KEY)
        good_again = read(other, "john")

    assert [answer.status_code for answer in (good, bad, good_again)] == [200, 503, 200]
    assert (good.json()["id"], good_again.json()["id"]) == ("jane", "john")
    assert bad.json()["type"] == "/problems/unavailable"
    assert "denies access" in bad.json()["detail"]
    output = bad.text + "".join(capsys.readouterr())
    assert "an-expired-secret" not in output
    assert SECRET_KEY not in output


def test_credentials_that_change_during_concurrent_reads_fail_none_of_them(
    ambient_settings: Settings, set_credentials: SetCredentials
):
    set_credentials("key-0", "secret")
    engine = Engine(ambient_settings, Connection.from_settings(ambient_settings))

    def sessions() -> None:
        for _ in range(8):
            with engine.session() as duck:
                duck.execute("SELECT 1").fetchall()

    with ThreadPoolExecutor(16) as pool:
        readers = [pool.submit(sessions) for _ in range(16)]
        for number in range(1, 21):
            set_credentials(f"key-{number}", "secret")
        for reader in readers:
            reader.result()
    with engine.session() as duck:
        ((shown,),) = duck.execute("SELECT secret_string FROM duckdb_secrets()").fetchall()
    engine.close()

    assert "key_id=key-20" in shown


# A store that fails


@pytest.fixture
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the time limit of storage requests to two attempts of one second."""
    monkeypatch.setattr(limits, "STANDSTILL", 1)
    monkeypatch.setattr(limits, "RETRIES", 1)


@contextmanager
def killed(server: S3Server) -> Iterator[None]:
    server.stop()
    yield


@contextmanager
def suspended(server: S3Server) -> Iterator[None]:
    if server.signal is None:
        pytest.skip("moto's server runs in this process and cannot be suspended")
    with server.paused():
        yield


Failing = Callable[[S3Server], AbstractContextManager[None]]


FAILING = pytest.mark.parametrize("failing", [killed, suspended])


def test_read_of_any_kind_without_its_store_is_503_with_retry_after(server: S3Server, api: InProcessApi, people: None):
    read(api, "jane")

    with killed(server):
        answers = [
            read(api, "john"),
            api.admin.get(f"{ENTITIES}/john/adjacent"),
            api.admin.post(f"{ENTITIES}/query", {}),
            api.admin.get(f"{ENTITIES}/stream"),
            api.admin.get("/v1/datasets/test/statements"),
            api.admin.delete(f"{ENTITIES}/john"),
        ]

    assert [answer.status_code for answer in answers] == [503] * len(answers)
    assert {answer.json()["type"] for answer in answers} == {"/problems/unavailable"}
    assert all(int(answer.headers["Retry-After"]) > 0 for answer in answers)


def test_read_of_a_stalled_store_times_out_and_the_next_one_succeeds(
    server: S3Server, short_timeouts: None, api: InProcessApi, people: None
):
    read(api, "jane")

    with suspended(server):
        began = monotonic()
        stalled = read(api, "john")
        took = monotonic() - began
    recovered = read(api, "john")

    assert (stalled.status_code, recovered.status_code) == (503, 200)
    # Two attempts of a second each; the rest is slack for a busy machine.
    assert 2 <= took < 10
    assert recovered.json()["properties"] == {"name": ["john"]}


@FAILING
def test_stream_whose_store_fails_midway_raises_unavailable(
    server: S3Server, short_timeouts: None, api: InProcessApi, dataset: Dataset, people: None, failing: Failing
):
    with api.services.reader.reading() as reading:
        _, chunks = statements.stream(reading, dataset, NOW, StatementFilter(), CSV)
        header = next(chunks)
        with failing(server), pytest.raises(Unavailable, match="store does not respond"), duckdb_errors_converted():
            next(chunks)

    assert header.startswith(b'"canonical_id"')
