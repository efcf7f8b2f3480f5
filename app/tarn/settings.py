"""Settings: read once from the `TARN_…` environment variables in `main` or `cli`, and passed down from there."""

import difflib
import json
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import psycopg
from psycopg.conninfo import make_conninfo
from pydantic import AfterValidator, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from tarn.errors import StartRefused

PREFIX = "TARN_"
CLIENT_VARIABLES = frozenset({"TARN_URL", "TARN_KEY"})
"""Environment variables of the CLI client; not settings of the server."""

RENAMED = {
    "fetch_patience": "fetch_timeout",
    "fetch_longest": "fetch_max_seconds",
    "spark_patience": "executor_timeout",
    "upkeep_every": "maintenance_interval",
    "stream_patience": "stream_timeout",
    "event_longest": "event_max_seconds",
    "event_most": "event_max_retained",
    "webhook_patience": "webhook_timeout",
}
"""Deprecated names of settings, and the current ones. A variable with a deprecated name still works."""

LAKE_SCHEMES = ("", "file", "s3", "gs", "az")

STORE = re.compile(r"(s3|gs|az)://[^/@?#\s]+(/[^/?#\s]+)*")

DATABASE_FORM = "must look like sqlite:///path or postgresql://user@host/name"

LEAST_KEY = 16
"""Minimum length of the administrator's key, in characters."""

LEAST_RATE = 0.001
"""Lowest rate limit other than 0 (no limit): below it, `Retry-After` would be uselessly long."""


def _sensible_rate(rate: float) -> float:
    if 0 < rate < LEAST_RATE:
        raise ValueError(f"must be 0 or at least {LEAST_RATE}")
    return rate


RequestRate = Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(_sensible_rate)]
"""Requests per second; 0 means no limit."""


def checked_admin_key(key: str) -> str:
    """Return the administrator's key, stripped of surrounding whitespace such as a file's final newline.

    Raises ValueError for a key that no request could present: one with characters that a header cannot carry, or one
    that looks like a tenant's key or a JWT and would be looked up as such.
    """
    key = key.strip()
    if len(key) < LEAST_KEY:
        raise ValueError(f"the key must have at least {LEAST_KEY} characters")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError("the key must be ASCII without spaces")
    if key.startswith("tarn_") or key.count(".") == 2:
        raise ValueError(
            "the key must not start with tarn_ or have two dots: it would be parsed as a tenant key or a JWT"
        )
    return key


class Settings(BaseSettings):
    """Configuration of a process: one lake, one database, one set of limits."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")

    lake_uri: str = Field("data/lake", description="Location of the lake: a local path, `s3://`, `gs://` or `az://`.")
    storage_options: Annotated[dict[str, SecretStr], NoDecode] = Field(
        default={},
        description="JSON object of object-store options (`aws_endpoint`, `aws_access_key_id`, …). "
        "Without keys here, the ambient identity is used: environment, profile, workload identity.",
    )
    backup_options: Annotated[dict[str, SecretStr], NoDecode] = Field(
        default={},
        description="JSON object of object-store options for where `tarn backup` writes and `tarn restore` reads; "
        "without it, `TARN_STORAGE_OPTIONS`, if the lake has the same URI scheme.",
    )
    database_url: str = Field("sqlite:///data/tarn.db", description="`sqlite:///path` or `postgresql://…`.")
    database_pool: int = Field(
        10,
        ge=1,
        le=1000,
        description="Size of a process's database connection pool. It may open as many again while all are in use, "
        "and 16 more on SQLite.",
    )

    host: str = Field("127.0.0.1", description="Address the API listens on.")
    port: int = Field(8000, ge=0, le=65535, description="Port the API listens on; 0 picks a free port.")
    public_url: str | None = Field(
        None,
        pattern=r"^https?://[^\s?#]+$",
        description="Public base URL of the API; URLs of exports and deltas in catalogs start with it. Without it, API "
        "responses use the URL of the request, and documents in the lake contain no URLs.",
    )
    metrics_port: int | None = Field(
        None, ge=1, le=65535, description="Serve `/metrics` on this separate port instead of the API's port."
    )
    worker_metrics_port: int | None = Field(
        None, ge=1, le=65535, description="Port on which a worker serves its metrics; without it, a worker serves none."
    )
    metrics_tenants: int = Field(
        0,
        ge=0,
        le=1000,
        description="Maximum number of tenants that request metrics have as label values; further ones are `other`. "
        "With 0, no tenant is named.",
    )
    traces_endpoint: str | None = Field(
        None,
        pattern=r"^https?://[^\s]+$",
        description="OpenTelemetry collector that receives traces by OTLP over HTTP, such as "
        "`http://collector:4318/v1/traces`. Needs `tarn[otel]`.",
    )
    cors_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(), description="Comma-separated CORS origins allowed to call the API from a browser; `*` for any."
    )
    shutdown_grace: int = Field(
        30, ge=0, description="Seconds that running requests and jobs have to finish at shutdown."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Minimum level that is logged.")
    log_format: Literal["auto", "json", "console"] = Field(
        "auto", description="`auto`: console format on a terminal, JSON otherwise."
    )

    umask: str = Field(
        "077",
        description="Octal file mode creation mask of every server process: the permission bits that files written by "
        "Tarn do not get. `027` lets the group read.",
    )
    admin_key: SecretStr | None = Field(
        None,
        description="The administrator's key: ASCII, 16 characters or more. "
        "Without it, a key is generated at the first start.",
    )
    admin_key_file: Path = Field(
        Path("data/admin.key"), description="File that stores the key generated at the first start, mode 0600."
    )
    oidc_issuer: str | None = Field(None, description="Accept JWTs of this OpenID Connect issuer.")
    oidc_audience: str | None = Field(None, description="The audience a JWT must name; required with an issuer.")
    oidc_jwks_url: str | None = Field(
        None, description="URL of the issuer's key set (JWKS); without it, the one in its discovery document."
    )
    oidc_tenant_claim: str = Field("tenant", description="The claim of a JWT that names the tenant.")
    oidc_allow_admin: bool = Field(
        False,
        description="Accept JWTs that name an administrator of the lake: the tenant `admin`, or a tenant with a grant "
        "of `admin` on `*`. Otherwise they are refused.",
    )

    max_document_bytes: int = Field(1 << 20, ge=1024, description="Largest JSON document, decompressed.")
    max_body_bytes: int = Field(16 << 30, ge=1024, description="Largest body of entities or statements, decompressed.")
    max_record_bytes: int = Field(16 << 20, ge=1024, description="Largest single entity or statement in a body.")
    max_file_bytes: int = Field(64 << 30, ge=1024, description="Largest file, decompressed if it is sent compressed.")
    body_idle_timeout: float = Field(
        30, gt=0, description="Seconds without a byte of a request body after which the request is refused (408)."
    )
    body_min_rate: int = Field(
        1024,
        ge=0,
        description="Minimum average rate of a request body in bytes per second, as sent; a slower request is refused "
        "(408). 0 means no minimum. Time during which the server does not read is not counted.",
    )
    body_rate_grace: float = Field(
        60, gt=0, description="Seconds that a request body may lag behind `TARN_BODY_MIN_RATE`, at its start and later."
    )
    rate_limit: RequestRate = Field(
        0,
        description="Requests per second per tenant and API process, unless the tenant has its own limit; 0 means no "
        "limit. Does not apply to the administrator.",
    )
    rate_burst: int = Field(
        100, ge=1, description="Requests a tenant may send in a burst before its rate limit applies."
    )
    quota_statements: int | None = Field(
        None, ge=0, description="Statements a tenant may write, unless it has its own quota."
    )
    quota_bytes: int | None = Field(
        None, ge=0, description="Bytes of files and their texts a tenant may store, unless it has its own quota."
    )
    audit_days: float = Field(90, gt=0, description="Days for which entries of the audit log are kept.")

    fetch_roots: Annotated[tuple[Path, ...], NoDecode] = Field(
        default=(),
        description="Comma-separated folders on the server; any tenant may fetch and crawl files below them.",
    )
    fetch_stores: Annotated[dict[str, dict[str, SecretStr]], NoDecode] = Field(
        default={},
        description="JSON object of stores that any tenant may fetch and crawl files from: `s3://bucket/folder`, "
        "`gs://…` or `az://…`, each with its options as in `TARN_STORAGE_OPTIONS`.",
    )
    fetch_private_hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="Comma-separated host names, IP addresses and networks that may be fetched from although they are "
        "not public, such as hosts of an intranet.",
    )
    fetch_max_bytes: int = Field(16 << 30, ge=1, description="Largest file that may be fetched, in bytes.")
    fetch_timeout: float = Field(
        30, gt=0, description="Seconds without a byte received after which a fetch from the web is aborted."
    )
    fetch_max_seconds: float = Field(3600, gt=0, description="Maximum duration of a fetch from the web, in seconds.")

    batch_expiry: float = Field(
        600, gt=0, description="Seconds without progress after which an upload of entities or statements expires."
    )
    stage_expiry: float = Field(3600, gt=0, description="Seconds without a request after which a stage expires.")
    upload_expiry: float = Field(
        86_400, gt=0, description="Seconds without progress after which the upload of a file expires."
    )
    idempotency_hours: float = Field(
        24, gt=0, description="Hours for which the response to an Idempotency-Key is kept."
    )
    journal_max_rows: int = Field(
        50_000_000, ge=1, description="Unflushed statements of a dataset above which writes are refused (429)."
    )
    journal_max_age: float = Field(
        7 * 86_400,
        gt=0,
        description="Age of the oldest unflushed statement, in seconds, above which writes are refused (429).",
    )

    queue_max_items: int = Field(
        10_000,
        ge=1,
        description="Maximum pending items of one tenant in a dataset's queue; more are refused (429).",
    )
    queue_days: float = Field(7, gt=0, description="Days for which a completed queue item is kept.")

    spark_master: str = Field("local[*]", description="Spark master on which the worker runs its jobs.")
    spark_memory: str = Field(
        "2g", pattern=r"^[1-9][0-9]*[mg]$", description="Memory of the Spark driver and executors."
    )
    spark_cores: int | None = Field(
        None,
        ge=1,
        description="Maximum cores of a standalone Spark cluster that a worker uses. Without it, the first worker "
        "takes all cores, and others get none.",
    )
    spark_secret: SecretStr | None = Field(
        None,
        min_length=16,
        description="Shared secret of the processes of a standalone Spark cluster (`spark.authenticate.secret`). "
        "On a local master and on Kubernetes, Spark generates one.",
    )
    executor_timeout: float = Field(
        600,
        gt=0,
        description="Seconds that a job on a Spark cluster waits for an executor before it is returned to the queue to "
        "be retried.",
    )
    spark_warm_up: bool = Field(
        True,
        description="Start Spark with the worker if TARN_SPARK_MASTER is local. Otherwise it starts with the worker's "
        "first job.",
    )
    maintenance_interval: float = Field(
        10, gt=0, description="Seconds between two checks for datasets that are due for maintenance."
    )
    job_days: float = Field(30, gt=0, description="Days for which a finished job is kept.")
    job_slots: int = Field(
        3,
        ge=1,
        le=32,
        description="Jobs that a worker runs concurrently, in addition to flushes. The last free slot is reserved for "
        "tenants without a running job.",
    )
    worker_poll: float = Field(
        5, gt=0, description="Interval in seconds at which a worker looks for work of which no notification reached it."
    )
    worker_heartbeat: float = Field(5, gt=0, description="Seconds between two heartbeats of a worker.")
    worker_silent_after: float = Field(
        30, gt=0, description="Seconds without a heartbeat after which a worker is considered dead."
    )

    flush_rows: int = Field(
        100_000, ge=1, description="Number of unflushed statements of a dataset that triggers a flush."
    )
    flush_bytes: int = Field(64 << 20, ge=1, description="Unflushed bytes of values that trigger a flush.")
    flush_age: float = Field(
        10, gt=0, description="Maximum age of an unflushed statement, in seconds, before a flush starts."
    )
    kernel_memory: str = Field(
        "512m", pattern=r"^[1-9][0-9]*[mg]$", description="Memory of one Spark task outside the JVM."
    )
    query_memory: str = Field(
        "1g",
        pattern=r"^[1-9][0-9]*[mg]$",
        description="Memory that an API process uses for queries; point lookups have a second limit of the same size.",
    )
    parser_memory: str = Field(
        "1g",
        pattern=r"^[1-9][0-9]*[mg]$",
        description="Maximum memory for parsing one body; a body that needs more is refused (413).",
    )
    query_temp_space: str = Field(
        "10g",
        pattern=r"^[1-9][0-9]*[mg]$",
        description="Disk space to which queries of an API process may spill when memory is full.",
    )
    query_threads: int = Field(2, ge=1, le=1024, description="Threads that execute the queries of an API process.")
    query_slots: int = Field(
        4,
        ge=2,
        le=1000,
        description="Queries that an API process runs concurrently, and separately as many point lookups. The last "
        "free slot of each is reserved for a tenant that has none.",
    )
    query_streams: int = Field(
        64,
        ge=1,
        le=100_000,
        description="Streams that an API process keeps open concurrently. The last free "
        "slot is reserved for a tenant that has none.",
    )
    query_seconds: float = Field(
        60,
        gt=0,
        le=86_400,
        description="Maximum duration of a query or point lookup in seconds, counted from when it gets a slot (504).",
    )
    stream_timeout: float = Field(
        300, gt=0, description="Seconds without the client reading after which a stream is closed."
    )
    stream_seconds: float = Field(
        600,
        gt=0,
        le=86_400,
        description="Maximum seconds that a stream's query may run until its first or its next rows. Time in which the "
        "client reads rows it was sent is not counted.",
    )
    event_poll: float = Field(
        5,
        gt=0,
        description="Interval in seconds at which an API process with open event streams looks for events of which no "
        "notification reached it.",
    )
    event_heartbeat: float = Field(
        15, gt=0, description="Seconds without an event after which an event stream sends a keep-alive comment."
    )
    event_max_seconds: float = Field(
        3600, gt=0, description="Seconds after which the server ends an event stream; its client reconnects."
    )
    event_streams: int = Field(1000, ge=1, le=100_000, description="Maximum open event streams of an API process.")
    event_streams_per_tenant: int = Field(
        100, ge=1, le=100_000, description="Maximum open event streams of one tenant at an API process."
    )
    event_days: float = Field(7, gt=0, description="Days for which an event is kept and can be replayed.")
    event_max_retained: int = Field(
        100_000, ge=1, description="Maximum number of events of one dataset that are kept and can be replayed."
    )
    webhook_timeout: float = Field(10, gt=0, description="Timeout in seconds of one webhook delivery.")
    webhook_attempts: int = Field(
        20, ge=1, le=1000, description="Delivery attempts of one event after which its webhook is disabled."
    )
    reader_heartbeat: float = Field(
        2, gt=0, description="Seconds between two heartbeats in which an API process reports the snapshots it reads."
    )
    reader_silent_after: float = Field(
        60, gt=0, description="Seconds without such a heartbeat after which a vacuum considers an API process dead."
    )
    overlay_rows: int = Field(
        500_000, ge=0, description="Unflushed statements that an API process caches in memory for reads."
    )
    lease_seconds: float = Field(60, gt=0, description="Seconds after which a lease that is not renewed expires.")
    commit_wait: float = Field(60, ge=0, description="Maximum seconds that a write waits for its flush.")
    commit_retries: int = Field(
        10, ge=0, description="Maximum number of retries of a commit that conflicted with another writer."
    )
    commit_backoff_base: float = Field(
        0.01,
        gt=0,
        description="Upper bound of the first back-off in seconds. The bound doubles with each retry; each wait is "
        "random between zero and the bound.",
    )
    commit_backoff_cap: float = Field(2.0, gt=0, description="Maximum back-off in seconds.")

    @property
    def parser_memory_bytes(self) -> int:
        return int(self.parser_memory[:-1]) << {"m": 20, "g": 30}[self.parser_memory[-1]]

    @field_validator("cors_origins", "fetch_roots", "fetch_private_hosts", mode="before")
    @classmethod
    def split_list(cls, value: Any) -> Any:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator("storage_options", "backup_options", mode="before")
    @classmethod
    def read_options(cls, value: Any) -> Any:
        return _parsed(value, '{"aws_region": "eu-central-1"}')

    @field_validator("fetch_stores", mode="before")
    @classmethod
    def read_stores(cls, value: Any) -> Any:
        return _parsed(value, '{"s3://bucket/folder": {"aws_region": "eu-central-1"}}')

    @field_validator("fetch_stores")
    @classmethod
    def known_stores(cls, value: dict[str, dict[str, SecretStr]]) -> dict[str, dict[str, SecretStr]]:
        if not all(STORE.fullmatch(uri) for uri in value):
            raise ValueError("each store must look like s3://bucket or s3://bucket/folder, or be of gs:// or az://")
        return value

    @field_validator("fetch_roots")
    @classmethod
    def absolute_roots(cls, value: tuple[Path, ...]) -> tuple[Path, ...]:
        if not all(root.is_absolute() and ".." not in root.parts for root in value):
            raise ValueError("each folder must be an absolute path")
        return value

    @field_validator("umask")
    @classmethod
    def octal_umask(cls, value: str) -> str:
        if not re.fullmatch(r"0?[0-7]{3}", value, re.ASCII):
            raise ValueError("must be three octal digits, such as 077 or 027")
        if int(value, 8) & 0o700:
            raise ValueError("must leave the owner every permission, such as 077 or 027")
        return value

    @field_validator("admin_key")
    @classmethod
    def presentable_key(cls, value: SecretStr | None) -> SecretStr | None:
        return None if value is None else SecretStr(checked_admin_key(value.get_secret_value()))

    @field_validator("lake_uri")
    @classmethod
    def known_scheme(cls, value: str) -> str:
        scheme = urlsplit(value).scheme
        if scheme not in LAKE_SCHEMES:
            raise ValueError("must be a local path or start with s3://, gs:// or az://")
        return value

    @field_validator("database_url")
    @classmethod
    def known_database(cls, value: str) -> str:
        try:
            url = make_url(value)
        except (ArgumentError, ValueError):
            raise ValueError(DATABASE_FORM) from None
        if url.get_backend_name() == "postgresql":
            _check_postgresql(url)
            return url.set(drivername="postgresql+psycopg").render_as_string(hide_password=False)
        path = value.partition(":")[2]
        if url.get_backend_name() != "sqlite" or not path.startswith("///"):
            raise ValueError(DATABASE_FORM)
        if not url.database or url.database == ":memory:" or url.query:
            raise ValueError("must name a file, and SQLite takes no options after it: sqlite:///path")
        return f"sqlite:{path}"

    @model_validator(mode="after")
    def fits_together(self) -> "Settings":
        if self.oidc_issuer and not self.oidc_audience:
            raise ValueError(
                "TARN_OIDC_ISSUER needs TARN_OIDC_AUDIENCE; without it, tokens for other applications would be accepted"
            )
        if self.database_url.startswith("sqlite") and not self.spark_master.startswith("local"):
            raise ValueError(
                "TARN_SPARK_MASTER is remote and TARN_DATABASE_URL is SQLite, a file that executors on other machines "
                "cannot read: use PostgreSQL, or a local master"
            )
        return self


def load_settings(**overrides: Any) -> Settings:
    """Return the settings from the environment. Raises StartRefused with one sentence naming the invalid variable."""
    deprecated = _deprecated_variables()
    known = {_variable(name) for name in Settings.model_fields} | CLIENT_VARIABLES
    for variable in sorted(name for name in os.environ if name.upper().startswith(PREFIX)):
        if variable.upper() not in known and variable not in deprecated:
            near = difflib.get_close_matches(variable.upper(), known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise StartRefused(f"{variable} is not a setting of Tarn{hint}")
    present = {name.upper() for name in os.environ}
    aliased: dict[str, str] = {}
    for variable, name in deprecated.items():
        if _variable(name) in present:
            raise StartRefused(
                f"{variable} and {_variable(name)} are both set: remove {variable}, the deprecated name of the same "
                "setting"
            )
        aliased[name] = variable
    values: dict[str, Any] = {name: os.environ[variable] for name, variable in aliased.items()} | overrides
    try:
        return Settings(**values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        where = f"{aliased.get(name, _variable(name))}: " if name else ""
        raise StartRefused(f"{where}{first['msg'].removeprefix('Value error, ')}") from None


def deprecation_warnings() -> list[str]:
    """Return one sentence for each environment variable that has a deprecated name."""
    return [f"{variable} is deprecated: use {_variable(name)}" for variable, name in _deprecated_variables().items()]


def _deprecated_variables() -> dict[str, str]:
    """Return the environment variables that have a deprecated name, each with the current name of its setting."""
    current = {_variable(former): name for former, name in RENAMED.items()}
    return {variable: current[variable.upper()] for variable in sorted(os.environ) if variable.upper() in current}


def _variable(name: str) -> str:
    return f"{PREFIX}{name.upper()}"


def _parsed(value: Any, example: str) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):  # without the parser's message, which could contain a secret
        raise ValueError(f"must be a JSON object, such as {example}") from None


def _check_postgresql(url: URL) -> None:
    """Raise ValueError for a connection option unknown to libpq, which would report it only when connecting."""
    try:
        make_conninfo(**dict.fromkeys(url.query, ""))
    except psycopg.Error as error:
        raise ValueError(str(error).strip()) from None


def settings_table() -> str:
    """Return the settings as a Markdown table: the body of docs/settings.md, which `make docs` writes."""
    lines = ["| variable | default | meaning |", "|---|---|---|"]
    deprecated = {name: _variable(former) for former, name in RENAMED.items()}
    for name, field in Settings.model_fields.items():
        default = field.get_default(call_default_factory=True, validated_data={})
        shown = "" if default is None or default in ({}, ()) else f"`{default}`"
        alias = f" Deprecated name: `{deprecated[name]}`." if name in deprecated else ""
        lines.append(f"| `{_variable(name)}` | {shown} | {field.description}{alias} |")
    return "\n".join(lines) + "\n"
