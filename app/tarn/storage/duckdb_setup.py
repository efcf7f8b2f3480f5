"""DuckDB on the lake's store, without ever fetching an extension."""

from pathlib import Path
from urllib.parse import urlsplit

import duckdb
import duckdb_extension_httpfs

from tarn.errors import StartRefused
from tarn.storage.s3_identity import Keys

OFF = ("autoinstall_known_extensions", "autoload_known_extensions")


def forbid_downloads(connection: duckdb.DuckDBPyConnection) -> None:
    """Extensions are those in DuckDB's wheel and httpfs's."""
    for setting in OFF:
        _set(connection, setting, False)


def load_httpfs(connection: duckdb.DuckDBPyConnection) -> None:
    """Load httpfs from its wheel. Raises StartRefused if the wheel does not fit this DuckDB."""
    wheel = Path(duckdb_extension_httpfs.__path__[0])
    extension = wheel / "extensions" / f"v{duckdb.__version__}" / "httpfs.duckdb_extension"
    if not extension.is_file():
        raise StartRefused(
            f"duckdb-extension-httpfs has no build for DuckDB {duckdb.__version__}: install them together"
        )
    quoted = str(extension).replace("'", "''")
    connection.execute(f"LOAD '{quoted}'")


def set_limits(connection: duckdb.DuckDBPyConnection, standstill: int, retries: int) -> None:
    """How long httpfs, which is loaded, waits for a store that sends nothing, and how often it asks again."""
    _set(connection, "http_timeout", standstill)
    _set(connection, "http_retries", retries)


def set_keys(
    connection: duckdb.DuckDBPyConnection, bucket: str, keys: Keys, region: str, endpoint: str | None, *, by_host: bool
) -> None:
    """Give DuckDB the keys for one bucket, in memory, in place of those it had. Nothing of them gets into an error."""
    parameters: dict[str, object] = {
        "KEY_ID": keys.access_key_id,
        "SECRET": keys.secret_access_key,
        "REGION": region,
        # Left out, it would be taken from AWS_SESSION_TOKEN, whoever that belongs to.
        "SESSION_TOKEN": keys.token or "",
        "SCOPE": f"s3://{bucket}",
    }
    if endpoint:
        url = urlsplit(endpoint)
        parameters["ENDPOINT"] = f"{url.netloc}{url.path}"
        parameters["USE_SSL"] = url.scheme == "https"
        parameters["URL_STYLE"] = "vhost" if by_host else "path"
    columns = ", ".join(f"{name} ?" for name in parameters)
    try:
        connection.execute(
            f"CREATE OR REPLACE SECRET tarn_lake (TYPE s3, PROVIDER config, {columns})", [*parameters.values()]
        )
    except duckdb.Error:
        raise StartRefused("DuckDB does not take the lake's S3 options") from None


def _set(connection: duckdb.DuckDBPyConnection, setting: str, value: bool | int) -> None:
    """Say it once, to every connection of the instance: later the configuration may be locked."""
    if connection.execute("SELECT current_setting(?)", [setting]).fetchone() != (value,):
        connection.execute(f"SET GLOBAL {setting} = {value}")
