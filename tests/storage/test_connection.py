"""One identity and one endpoint for obstore, deltalake, DuckDB and other processes."""

import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote

import duckdb
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from deltalake import DeltaTable, write_deltalake
from tarn.errors import StartRefused
from tarn.settings import Settings
from tarn.storage import connection as limits
from tarn.storage.connection import Connection
from tarn.storage.store import ObjectMissing, Store

from tests.s3 import ACCESS_KEY, SECRET_KEY, S3Server, moto_server

READ_IN_ANOTHER_PROCESS = """
import pickle, sys
import duckdb
from deltalake import DeltaTable
from tarn.storage.store import Store
connection = pickle.load(sys.stdin.buffer)
table = DeltaTable(connection.table_uri("ds/table"), storage_options=connection.delta_options())
database = duckdb.connect()
connection.prepare(database)
path = connection.file_url("ds/table/" + table.get_add_actions()["path"][0].as_py())
print(Store(connection).get("ds/doc").decode(), table.count(), *database.read_parquet(path).fetchall()[-1])
"""


def connect(uri: str, **options: str) -> Connection:
    return Connection.from_settings(Settings(lake_uri=uri, storage_options=options))


def write(connection: Connection) -> None:
    Store(connection).put("ds/doc", b"hello")
    write_deltalake(
        connection.table_uri("ds/table"), pa.table({"n": [1, 2]}), storage_options=connection.delta_options()
    )


def read(connection: Connection) -> tuple[bytes, list[int], list[tuple[int]]]:
    """Return what obstore, deltalake and DuckDB each read."""
    table = DeltaTable(connection.table_uri("ds/table"), storage_options=connection.delta_options())
    paths = [connection.file_url(f"ds/table/{path}") for path in pa.table(table.get_add_actions())["path"].to_pylist()]
    with duckdb.connect() as database:
        connection.prepare(database)
        rows = database.execute("SELECT n FROM read_parquet(?) ORDER BY n", [paths]).fetchall()
    return Store(connection).get("ds/doc"), sorted(table.to_pyarrow_table()["n"].to_pylist()), rows


READ_BY_ALL = (b"hello", [1, 2], [(1,), (2,)])


@pytest.fixture
def ambient(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Connection:
    """Provide a lake whose endpoint and keys come from the environment alone."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    return Connection.from_settings(s3.settings(storage_options={}))


def test_every_library_reads_the_same_lake(connection):
    write(connection)
    assert read(connection) == READ_BY_ALL


def test_ambient_and_configured_identity_read_the_same_lake(s3, ambient, monkeypatch):
    write(ambient)
    assert read(ambient) == READ_BY_ALL
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    assert read(Connection.from_settings(s3.settings(lake_uri=ambient.uri))) == READ_BY_ALL


def test_identity_of_a_profile_is_used_as_ambient_identity(s3, tmp_path, monkeypatch):
    config = tmp_path / "config"
    config.write_text(
        f"[profile lake]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
        f"endpoint_url = {s3.endpoint}\nregion = us-east-1\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_PROFILE", "lake")
    connection = Connection.from_settings(s3.settings(storage_options={}))
    write(connection)
    assert read(connection) == READ_BY_ALL


def test_workload_identity_is_exchanged_for_keys_that_every_library_uses(tmp_path, monkeypatch):
    (tmp_path / "token").write_text("a-token-of-the-cluster")
    with moto_server() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        monkeypatch.setenv("AWS_REGION", "eu-west-1")
        monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/tarn")
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
        connection = Connection.from_settings(server.settings(storage_options={}))
        write(connection)
        assert read(connection) == READ_BY_ALL
        issued = connection.delta_options()
        assert issued["aws_access_key_id"].startswith("ASIA")
        assert issued["aws_session_token"]
        assert issued["aws_region"] == "eu-west-1"
        assert issued["aws_session_token"] not in connection.redact(f"<Token>{issued['aws_session_token']}</Token>")


def in_another_process(connection: Connection, **environ: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    run = subprocess.run(
        [sys.executable, "-c", READ_IN_ANOTHER_PROCESS],
        input=pickle.dumps(connection),
        env=clean | {"AWS_EC2_METADATA_DISABLED": "true"} | environ,
        stdout=subprocess.PIPE,
        check=True,
    )
    return run.stdout.decode().strip()


def test_pickled_connection_reads_the_same_lake_in_another_process(connection):
    write(connection)
    assert in_another_process(connection) == "hello 2 2"


def test_pickled_ambient_connection_has_its_endpoint_and_no_keys(ambient):
    write(ambient)
    assert SECRET_KEY.encode() not in pickle.dumps(ambient)
    keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    assert in_another_process(ambient, **keys) == "hello 2 2"


class Recorder(ThreadingHTTPServer):
    """An HTTP server that responds 404 to everything and records the credentials of requests."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, str, str | None]] = set()
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                key, _date, region = self.headers["Authorization"].split("Credential=")[1].split("/")[:3]
                recorder.seen.add((key, region, self.headers.get("x-amz-security-token")))
                self.send_response(404)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_HEAD = do_GET

            def log_message(self, format, *args):
                pass

        super().__init__(("127.0.0.1", 0), Handler)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    server = Recorder()
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def foreign_environment(monkeypatch):
    """Set the environment variables of another program's identity."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "OTHER",
        "AWS_SECRET_ACCESS_KEY": "other-secret",
        "AWS_SESSION_TOKEN": "other-token",
        "AWS_REGION": "other-1",
        "AWS_DEFAULT_REGION": "other-2",
        "AWS_ENDPOINT": "http://127.0.0.1:1",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:1",
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true",
        "AWS_SKIP_SIGNATURE": "true",
        "AWS_ALLOW_HTTP": "false",
        "AWS_BUCKET": "other",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(("token", "sent"), [({"aws_session_token": "ours"}, {"ours"}), ({}, {None, ""})])
def test_configured_identity_takes_precedence_over_the_environment_in_every_library(
    recorder, foreign_environment, token, sent
):
    connection = connect(
        "s3://lake/root",
        aws_endpoint=f"http://127.0.0.1:{recorder.server_port}",
        aws_access_key_id="OURS",
        aws_secret_access_key="our-secret",
        aws_region="ours-1",
        **token,
    )
    by_library = []
    with pytest.raises(ObjectMissing):
        Store(connection).get("ds/doc")
    by_library.append({*recorder.seen})
    recorder.seen.clear()
    with pytest.raises(OSError, match="S3"):
        DeltaTable(connection.table_uri("ds/table"), storage_options=connection.delta_options())
    by_library.append({*recorder.seen})
    recorder.seen.clear()
    with duckdb.connect() as database, pytest.raises(duckdb.HTTPException):
        connection.prepare(database)
        database.read_parquet(connection.file_url("ds/file.parquet"))
    by_library.append({*recorder.seen})
    for seen in by_library:
        assert {(key, region) for key, region, _ in seen} == {("OURS", "ours-1")}
        assert {token for _, _, token in seen} <= sent


def test_deltalake_times_out_on_a_server_that_does_not_respond(monkeypatch):
    monkeypatch.setattr(limits, "WHOLE_REQUEST", "50ms")
    monkeypatch.setattr(limits, "RETRIES", 1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = S3Server(f"http://127.0.0.1:{listener.getsockname()[1]}").connection()
        with pytest.raises(OSError, match="S3"):
            DeltaTable(connection.table_uri("t"), storage_options=connection.delta_options())


def test_duckdb_times_out_within_a_minute_on_a_server_that_does_not_respond(s3):
    with duckdb.connect() as database:
        s3.connection().prepare(database)
        names = ("http_timeout", "http_retries", "http_retry_wait_ms", "http_retry_backoff")
        query = f"SELECT {', '.join(f'current_setting({name!r})' for name in names)}"
        ((timeout, retries, wait, backoff),) = database.cursor().execute(query).fetchall()
    waits = sum(wait / 1000 * backoff**number for number in range(retries))
    assert 45 < (1 + retries) * timeout + waits <= 60


def test_duckdb_never_installs_extensions_and_can_be_prepared_again_when_locked(connection, tmp_path):
    write(connection)
    # Not the extensions in the home folder, where other programs may have installed some.
    with duckdb.connect(config={"extension_directory": str(tmp_path)}) as database:
        connection.prepare(database)
        database.execute("SET lock_configuration = true")
        connection.prepare(database)
        settings = (
            "SELECT current_setting('autoinstall_known_extensions'), current_setting('autoload_known_extensions')"
        )
        assert database.execute(settings).fetchone() == (False, False)
        loaded = database.execute("SELECT extension_name FROM duckdb_extensions() WHERE installed AND NOT loaded")
        assert loaded.fetchall() == []


def test_duckdb_keys_are_for_the_bucket_only_and_are_redacted(s3):
    connection = s3.connection()
    with duckdb.connect() as database:
        connection.prepare(database)
        connection.prepare(database)
        secrets = database.execute("SELECT scope, secret_string FROM duckdb_secrets()").fetchall()
    assert [scope for scope, _ in secrets] == [["s3://lake"]]
    assert SECRET_KEY not in str(secrets)


def test_duckdb_of_another_version_than_the_extension_stops_the_start(s3, monkeypatch):
    monkeypatch.setattr(duckdb, "__version__", "0.0.1")
    with duckdb.connect() as database, pytest.raises(StartRefused, match=r"no build for DuckDB 0\.0\.1"):
        s3.connection().prepare(database)


def test_value_with_quotes_is_escaped(s3):
    connection = Connection.from_settings(s3.settings(storage_options=s3.options | {"aws_region": "x', KEY_ID 'y"}))
    with duckdb.connect() as database:
        connection.prepare(database)
        assert "region=x', KEY_ID 'y" in str(
            database.execute("SELECT secret_string FROM duckdb_secrets()").fetchone()[0]
        )


@pytest.mark.parametrize("uri", ["{0}/lake", "file://{0}/lake", "file://localhost{0}/la%6be"])
def test_local_path_in_any_form_is_the_same_folder(tmp_path, uri):
    assert connect(uri.format(tmp_path)).folder == tmp_path / "lake"


def test_relative_path_is_resolved_once_against_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    connection = connect("data/lake")
    monkeypatch.chdir("/")
    Store(connection).put("doc", b"1")
    assert (tmp_path / "data/lake/doc").read_bytes() == b"1"


def test_folder_with_characters_of_urls_in_its_name_works(tmp_path):
    connection = connect(str(tmp_path / "50% #1 ?"))
    write(connection)
    assert read(connection) == READ_BY_ALL


GOOGLE = {"google_service_account_key": '{"private_key": "sekrit", "client_email": "x"}'}
AZURE = {"azure_storage_account_name": "acc", "azure_storage_account_key": "c2Vrcml0"}


@pytest.mark.parametrize(
    ("uri", "options", "sentence"),
    [
        ("/data", {"aws_region": "x"}, "a lake on a local path takes no options"),
        ("file://host/data", {}, "file:///path"),
        ("s3://", {}, "s3://bucket"),
        ("s3:///folder", {}, "s3://bucket"),
        ("s3://key:sekrit@bucket", {}, "s3://bucket"),
        ("s3://bucket?x=sekrit", {}, "s3://bucket"),
        ("s3://b", {"aws_acess_key_id": "sekrit"}, "aws_acess_key_id is not .* did you mean aws_access_key_id"),
        ("s3://b", {"aws_access_key_id": "sekrit"}, "set both aws_access_key_id and aws_secret_access_key"),
        ("s3://b", {"aws_secret_access_key": "sekrit"}, "set both aws_access_key_id and aws_secret_access_key"),
        ("s3://b", {"aws_session_token": "sekrit"}, "aws_session_token needs"),
        ("s3://b", {"aws_region": "x", "REGION": "y"}, "REGION is set twice"),
        ("s3://b", {"aws_endpoint": "localhost:9000"}, "https://host:port"),
        ("s3://b", {"aws_endpoint": "http://u:sekrit@host"}, "https://host:port"),
        ("s3://b", {"aws_endpoint": "http://host", "allow_http": "false"}, "allow_http is false"),
        ("s3://b", {}, "no credentials"),
        ("gs://b", {"aws_region": "sekrit"}, "aws_region is not an option of an gs://"),
        ("gs://b", {"google_service_account_key": "sekrit"}, "options cannot be used"),
        ("az://b", {}, "options cannot be used"),
        ("az://b", AZURE | {"azure_storage_account_key": "!sekrit!"}, "options cannot be used"),
    ],
)
def test_unusable_uri_or_option_stops_the_start_with_one_sentence(uri, options, sentence):
    with pytest.raises(StartRefused, match=sentence) as caught:
        connect(uri, **options)
    assert "sekrit" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_profile_stops_the_start(monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(StartRefused, match="profile"):
        connect("s3://bucket")


def test_secrets_are_not_in_the_representation():
    connection = connect("s3://b/x/", aws_access_key_id="AKIA", aws_secret_access_key="sekrit", token="sekrit-token")
    assert repr(connection) == "Connection(uri='s3://b/x')"
    assert "sekrit" not in repr(vars(Store(connection)))
    assert "sekrit" not in repr(vars(connection._identity))
    assert connection.redact("<Secret>sekrit</Secret> sekrit-token") == "<Secret>***</Secret> ***"


def test_virtual_hosts_give_every_library_the_same_endpoint():
    connection = connect(
        "s3://b",
        aws_access_key_id="k",
        aws_secret_access_key="s",
        aws_endpoint="https://oss.example.org",
        aws_virtual_hosted_style_request="true",
    )
    assert connection.delta_options()["aws_endpoint"] == "https://b.oss.example.org"
    with duckdb.connect() as database:
        connection.prepare(database)
        secret = database.execute("SELECT secret_string FROM duckdb_secrets()").fetchone()[0]
    assert "endpoint=oss.example.org" in secret
    assert "url_style=vhost" in secret


def test_google_and_azure_options_reach_obstore_and_deltalake_under_the_same_names():
    azure = connect("az://container/folder", **AZURE)
    assert azure.delta_options().items() >= AZURE.items()
    assert azure.object_store().prefix == "folder"
    assert azure.table_uri("ds/table") == azure.file_url("ds/table") == "az://container/folder/ds/table"
    with duckdb.connect() as database:
        azure.prepare(database)
        azure.prepare(database)
        assert database.list_filesystems() == ["az"]


@pytest.fixture
def google(tmp_path: Path) -> Iterator[str]:
    """Serve the objects in `tmp_path` as Google's storage does for readers, completely or in ranges."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            data = (tmp_path / unquote(self.path).lstrip("/")).read_bytes()
            first, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")
            part = data[int(first) : int(last) + 1 if last else None]
            self.send_response(206 if "Range" in self.headers else 200)
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}")
            self.send_header("Content-Length", str(len(part)))
            self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
            self.send_header("ETag", '"1"')
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(part)

        do_HEAD = do_GET

        def log_message(self, format, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_duckdb_reads_google_storage_through_the_store_of_obstore(google, tmp_path):
    (tmp_path / "bucket/lake/ds").mkdir(parents=True)
    parquet.write_table(pa.table({"n": [1, 2]}), tmp_path / "bucket/lake/ds/file.parquet")
    connection = connect("gs://bucket/lake", google_base_url=google, google_skip_signature="true")
    assert Store(connection).get_range("ds/file.parquet", 0, 4) == b"PAR1"
    with duckdb.connect() as database:
        connection.prepare(database)
        assert database.read_parquet(connection.file_url("ds/file.parquet")).fetchall() == [(1,), (2,)]


def test_data_folder_has_the_path_of_the_format(disk, tmp_path):
    write(disk)
    assert Path(tmp_path / "lake/ds/table/_delta_log").is_dir()
