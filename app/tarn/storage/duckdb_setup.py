"""DuckDB configuration for the lake's store: httpfs from its wheel, limits and S3 keys; no extension downloads."""

from pathlib import Path
from urllib.parse import urlsplit

import duckdb
import duckdb_extension_httpfs

from tarn.errors import StartRefused
from tarn.storage.duckdb_sql import quote_literal
from tarn.storage.s3_identity import Keys

OFF = ("autoinstall_known_extensions", "autoload_known_extensions")


def forbid_downloads(connection: duckdb.DuckDBPyConnection) -> None:
    """Turn off automatic extensions: only those in the wheels of DuckDB and httpfs are used."""
    for setting in OFF:
        _set(connection, setting, False)


def load_httpfs(connection: duckdb.DuckDBPyConnection) -> None:
    """Load httpfs from its wheel. Raises StartRefused if the wheel has no build for this DuckDB version."""
    wheel = Path(duckdb_extension_httpfs.__path__[0])
    extension = wheel / "extensions" / f"v{duckdb.__version__}" / "httpfs.duckdb_extension"
    if not extension.is_file():
        raise StartRefused(
            f"duckdb-extension-httpfs has no build for DuckDB {duckdb.__version__}: install them together"
        )
    connection.execute(f"LOAD {quote_literal(str(extension))}")


def set_limits(connection: duckdb.DuckDBPyConnection, standstill: int, retries: int) -> None:
    """Set httpfs's timeout for a stalled store and its number of retries. httpfs must be loaded."""
    _set(connection, "http_timeout", standstill)
    _set(connection, "http_retries", retries)


def set_keys(
    connection: duckdb.DuckDBPyConnection, bucket: str, keys: Keys, region: str, endpoint: str | None, *, by_host: bool
) -> None:
    """Set or replace DuckDB's keys for one bucket, in memory. Errors do not contain them."""
    parameters: dict[str, object] = {
        "KEY_ID": keys.access_key_id,
        "SECRET": keys.secret_access_key,
        "REGION": region,
        # If omitted, DuckDB would read AWS_SESSION_TOKEN, which may belong to other keys.
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
        raise StartRefused("DuckDB rejects the lake's S3 options: check TARN_STORAGE_OPTIONS") from None


def _set(connection: duckdb.DuckDBPyConnection, setting: str, value: bool | int) -> None:
    """Set an option once for all connections of the instance: later the configuration may be locked."""
    if connection.execute("SELECT current_setting(?)", [setting]).fetchone() != (value,):
        connection.execute(f"SET GLOBAL {setting} = {value}")
