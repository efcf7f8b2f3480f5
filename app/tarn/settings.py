"""Every setting there is: read once from `TARN_…` in `main` or `cli`, and passed down from there."""

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
"""Read by the CLI when it speaks to a server; no settings of the server."""

LAKE_SCHEMES = ("", "file", "s3", "gs", "az")

STORE = re.compile(r"(s3|gs|az)://[^/@?#\s]+(/[^/?#\s]+)*")

DATABASE_FORM = "must look like sqlite:///path or postgresql://user@host/name"

LEAST_KEY = 16
"""Characters that the administrator's key has at least."""

LEAST_RATE = 0.001
"""The lowest limit there is besides none: below it a wait has no sensible number of seconds."""


def _sensible_rate(rate: float) -> float:
    if 0 < rate < LEAST_RATE:
        raise ValueError(f"must be 0 or at least {LEAST_RATE}")
    return rate


RequestRate = Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(_sensible_rate)]
"""Requests a second; 0 is no limit."""


def checked_admin_key(key: str) -> str:
    """The administrator's key, without the line end that a file gives it.

    Raises ValueError for what no request could present: a header carries no such character, and what looks like a
    tenant's key or like a JWT is looked for among those.
    """
    key = key.strip()
    if len(key) < LEAST_KEY:
        raise ValueError(f"the key must have at least {LEAST_KEY} characters")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError("the key must be ASCII without spaces")
    if key.startswith("tarn_") or key.count(".") == 2:
        raise ValueError("the key must not start with tarn_ or have two dots: it would be taken for another kind")
    return key


class Settings(BaseSettings):
    """One lake, one database, one set of limits."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")

    lake_uri: str = Field("data/lake", description="Where the data lives: a local path, `s3://`, `gs://` or `az://`.")
    storage_options: Annotated[dict[str, SecretStr], NoDecode] = Field(
        default={},
        description="JSON object of object-store options (`aws_endpoint`, `aws_access_key_id`, …). "
        "Without keys here, the ambient identity is used: environment, profile, workload identity.",
    )
    backup_options: Annotated[dict[str, SecretStr], NoDecode] = Field(
        default={},
        description="JSON object of object-store options for where `tarn backup` writes and `tarn restore` reads; "
        "without it, those of a lake of the same kind.",
    )
    database_url: str = Field("sqlite:///data/tarn.db", description="`sqlite:///path` or `postgresql://…`.")
    database_pool: int = Field(
        10,
        ge=1,
        le=1000,
        description="Connections a process keeps to the database; it takes as many again while all are in use, "
        "and 16 more on SQLite.",
    )

    host: str = Field("127.0.0.1", description="Address the API listens on.")
    port: int = Field(8000, ge=0, le=65535, description="Port the API listens on; 0 takes a free one.")
    public_url: str | None = Field(
        None,
        pattern=r"^https?://[^\s?#]+$",
        description="Where clients reach the API: exports and deltas in catalogs have addresses below it. Without it, "
        "answers of the API use the address of the request, and documents in the lake have no addresses.",
    )
    metrics_port: int | None = Field(
        None, ge=1, le=65535, description="Serve `/metrics` on a port of its own instead of the API's."
    )
    worker_metrics_port: int | None = Field(
        None, ge=1, le=65535, description="Serve the metrics of a worker on this port; without one it listens on none."
    )
    metrics_tenants: int = Field(
        0,
        ge=0,
        le=1000,
        description="Tenants that metrics of requests tell apart; any further one is `other`, and with 0 none is told.",
    )
    traces_endpoint: str | None = Field(
        None,
        pattern=r"^https?://[^\s]+$",
        description="Send traces to this OpenTelemetry collector, by OTLP over HTTP: "
        "`http://collector:4318/v1/traces`, say. Needs `tarn[otel]`.",
    )
    cors_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(), description="Comma-separated origins that browsers may call from; `*` for any."
    )
    shutdown_grace: int = Field(30, ge=0, description="Seconds that running requests and jobs get to finish.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="The least level logged.")
    log_format: Literal["auto", "json", "console"] = Field(
        "auto", description="`auto` is for people on a terminal and JSON elsewhere."
    )

    umask: str = Field(
        "077",
        description="Octal file mode creation mask of every process of the server: permissions that files which Tarn "
        "writes do not have. `027` lets the group read.",
    )
    admin_key: SecretStr | None = Field(
        None,
        description="The administrator's key while it is set: ASCII, 16 characters or more. "
        "Without it one is made at the first start.",
    )
    admin_key_file: Path = Field(
        Path("data/admin.key"), description="Where the key made at the first start is kept, mode 0600."
    )
    oidc_issuer: str | None = Field(None, description="Accept JWTs of this OpenID Connect issuer.")
    oidc_audience: str | None = Field(None, description="The audience a JWT must name; needed with an issuer.")
    oidc_jwks_url: str | None = Field(None, description="The issuer's keys, if not where its discovery document says.")
    oidc_tenant_claim: str = Field("tenant", description="The claim of a JWT that names the tenant.")
    oidc_allow_admin: bool = Field(
        False,
        description="Accept JWTs that name an administrator of the lake: the tenant `admin`, or one that was granted "
        "`admin` on `*`. Otherwise they are refused.",
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
        description="Bytes a second, as sent, that a request body must arrive at on average, or the request is refused "
        "(408); 0 is no minimum. Time during which the server does not read does not count.",
    )
    body_rate_grace: float = Field(
        60, gt=0, description="Seconds that a request body may be behind `TARN_BODY_MIN_RATE`, at its start and later."
    )
    rate_limit: RequestRate = Field(
        0,
        description="Requests a second per tenant and API process, unless the tenant has its own; 0 is no limit. "
        "The administrator has none.",
    )
    rate_burst: int = Field(100, ge=1, description="Requests a tenant may send at once before its rate limit counts.")
    quota_statements: int | None = Field(
        None, ge=0, description="Statements a tenant may write, unless it has its own quota."
    )
    quota_bytes: int | None = Field(
        None, ge=0, description="Bytes of files and their texts a tenant may store, unless it has its own quota."
    )
    audit_days: float = Field(90, gt=0, description="Days for which the audit log is kept.")

    fetch_roots: Annotated[tuple[Path, ...], NoDecode] = Field(
        default=(),
        description="Comma-separated folders of the server from below which any tenant may fetch and crawl files.",
    )
    fetch_stores: Annotated[dict[str, dict[str, SecretStr]], NoDecode] = Field(
        default={},
        description="JSON object of stores that any tenant may fetch and crawl files from: `s3://bucket/folder`, "
        "`gs://…` or `az://…`, each with its options as in `TARN_STORAGE_OPTIONS`.",
    )
    fetch_private_hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="Comma-separated host names, addresses and networks that may be fetched from though they are not "
        "public, in an intranet say.",
    )
    fetch_max_bytes: int = Field(16 << 30, ge=1, description="Largest file that is fetched.")
    fetch_patience: float = Field(
        30, gt=0, description="Seconds without a byte after which a fetch from the web is given up."
    )
    fetch_longest: float = Field(3600, gt=0, description="Seconds that a fetch from the web takes at most.")

    batch_expiry: float = Field(600, gt=0, description="Seconds after which an upload that stands still is given up.")
    stage_expiry: float = Field(3600, gt=0, description="Seconds after which a stage that is left alone is given up.")
    upload_expiry: float = Field(
        86_400, gt=0, description="Seconds after which the upload of a file that stands still is given up."
    )
    idempotency_hours: float = Field(24, gt=0, description="Hours for which the answer to an Idempotency-Key is kept.")
    journal_max_rows: int = Field(
        50_000_000, ge=1, description="Unflushed statements of a dataset past which writes must wait (429)."
    )
    journal_max_age: float = Field(
        7 * 86_400, gt=0, description="Seconds the oldest unflushed statement may wait before writes must (429)."
    )

    queue_max_items: int = Field(
        10_000,
        ge=1,
        description="Items of one tenant that may wait in a dataset's queue; more must wait outside (429).",
    )
    queue_days: float = Field(7, gt=0, description="Days for which a queue item that is done can be looked at.")

    spark_master: str = Field("local[*]", description="The Spark master that the worker runs its jobs on.")
    spark_memory: str = Field(
        "2g", pattern=r"^[1-9][0-9]*[mg]$", description="Memory of the Spark driver and executors."
    )
    spark_cores: int | None = Field(
        None,
        ge=1,
        description="Cores of a standalone Spark cluster that a worker takes at most. Without it the first worker "
        "takes all, and the others have none.",
    )
    spark_secret: SecretStr | None = Field(
        None,
        min_length=16,
        description="The secret that the processes of a standalone Spark cluster share (`spark.authenticate.secret`). "
        "On a local master and on Kubernetes Spark makes one by itself.",
    )
    spark_patience: float = Field(
        600,
        gt=0,
        description="Seconds that a job on a Spark cluster waits while there is no executor, before it goes back to be "
        "tried again.",
    )
    upkeep_every: float = Field(
        10, gt=0, description="Seconds between two looks for datasets that are due for maintenance."
    )
    job_days: float = Field(30, gt=0, description="Days for which a job that is over can be looked at.")
    job_slots: int = Field(
        3,
        ge=1,
        le=32,
        description="Jobs that a worker runs at the same time, beside flushes. A tenant that has one running leaves "
        "the last free slot to others.",
    )
    worker_poll: float = Field(0.5, gt=0, description="Seconds between two looks for work.")
    worker_heartbeat: float = Field(5, gt=0, description="Seconds between two signs of life of a worker.")
    worker_silent_after: float = Field(
        30, gt=0, description="Seconds without a sign of life after which a worker counts as dead."
    )

    flush_rows: int = Field(100_000, ge=1, description="Unflushed statements of a dataset that start a flush.")
    flush_bytes: int = Field(64 << 20, ge=1, description="Unflushed bytes of values that start a flush.")
    flush_age: float = Field(10, gt=0, description="Seconds that a statement waits for its flush at most.")
    kernel_memory: str = Field(
        "512m", pattern=r"^[1-9][0-9]*[mg]$", description="Memory of one Spark task's own work, outside the JVM."
    )
    query_memory: str = Field(
        "1g",
        pattern=r"^[1-9][0-9]*[mg]$",
        description="Memory that an API process uses for queries. Gets of one entity have as much, and seldom need it.",
    )
    parser_memory: str = Field(
        "1g",
        pattern=r"^[1-9][0-9]*[mg]$",
        description="Memory that parsing one body takes at most; a body that needs more is refused (413).",
    )
    query_temp_space: str = Field(
        "10g", pattern=r"^[1-9][0-9]*[mg]$", description="Disk that an API process uses for queries beyond that memory."
    )
    query_threads: int = Field(2, ge=1, le=1024, description="Threads that work on an API process's queries.")
    query_slots: int = Field(
        4,
        ge=2,
        le=1000,
        description="Queries that an API process works on at once, and beside them as many gets. The last free one of "
        "each is kept for a tenant that has none.",
    )
    query_streams: int = Field(
        64,
        ge=1,
        le=100_000,
        description="Streams that an API process keeps open at once. The last free "
        "one is kept for a tenant that has none.",
    )
    query_seconds: float = Field(
        60,
        gt=0,
        le=86_400,
        description="Seconds that a query or a get may run before it is stopped (504), from when it has a slot.",
    )
    stream_patience: float = Field(
        300, gt=0, description="Seconds after which a stream whose client takes nothing is broken off."
    )
    stream_seconds: float = Field(
        600,
        gt=0,
        le=86_400,
        description="Seconds that a stream's query may run for its first or its next rows before it is stopped. Time "
        "in which the client takes what it was sent does not count.",
    )
    event_poll: float = Field(0.5, gt=0, description="Seconds between two looks of an API process for new events.")
    event_heartbeat: float = Field(
        15, gt=0, description="Seconds without an event after which a stream of them shows that it is alive."
    )
    event_longest: float = Field(
        3600, gt=0, description="Seconds after which a stream of events ends, and its client comes again."
    )
    event_streams: int = Field(
        1000, ge=1, le=100_000, description="Streams of events that an API process keeps open at once."
    )
    event_streams_per_tenant: int = Field(
        100, ge=1, le=100_000, description="Streams of events that one tenant keeps open at an API process."
    )
    event_days: float = Field(7, gt=0, description="Days for which an event can be told again.")
    event_most: int = Field(100_000, ge=1, description="Events of one dataset that can be told again.")
    webhook_patience: float = Field(10, gt=0, description="Seconds that a webhook's receiver has for one event.")
    webhook_attempts: int = Field(
        20, ge=1, le=1000, description="How often an event is sent to a webhook before the webhook is given up."
    )
    reader_heartbeat: float = Field(
        2, gt=0, description="Seconds between two reports of an API process on what it reads."
    )
    reader_silent_after: float = Field(
        60, gt=0, description="Seconds without a report after which a vacuum takes an API process for dead."
    )
    overlay_rows: int = Field(
        500_000, ge=0, description="Unflushed statements that an API process keeps in memory for its readers."
    )
    lease_seconds: float = Field(60, gt=0, description="Seconds after which a lease that is not renewed is free.")
    commit_wait: float = Field(60, ge=0, description="Seconds a write waits for its flush.")
    commit_retries: int = Field(10, ge=0, description="How often a commit that lost a race is tried again.")
    commit_backoff_base: float = Field(
        0.01, gt=0, description="Seconds of the first back-off; each is drawn from zero up to twice the last bound."
    )
    commit_backoff_cap: float = Field(2.0, gt=0, description="The longest back-off in seconds.")

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
            raise ValueError("TARN_OIDC_ISSUER needs TARN_OIDC_AUDIENCE, or tokens meant for others would be accepted")
        if self.database_url.startswith("sqlite") and not self.spark_master.startswith("local"):
            raise ValueError(
                "TARN_SPARK_MASTER is remote and TARN_DATABASE_URL is SQLite, a file that executors on other machines "
                "cannot read: use PostgreSQL, or a local master"
            )
        return self


def load_settings(**overrides: Any) -> Settings:
    """Settings from the environment. Raises StartRefused with one sentence naming the variable that is wrong."""
    known = {f"{PREFIX}{name}".upper() for name in Settings.model_fields} | CLIENT_VARIABLES
    for variable in sorted(name for name in os.environ if name.upper().startswith(PREFIX)):
        if variable.upper() not in known:
            near = difflib.get_close_matches(variable.upper(), known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise StartRefused(f"{variable} is not a setting of Tarn{hint}")
    try:
        return Settings(**overrides)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = f"{PREFIX}{str(first['loc'][0]).upper()}: " if first["loc"] else ""
        raise StartRefused(f"{where}{first['msg'].removeprefix('Value error, ')}") from None


def _parsed(value: Any, example: str) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):  # without the parser's words, which could repeat a secret
        raise ValueError(f"must be a JSON object, such as {example}") from None


def _check_postgresql(url: URL) -> None:
    """Raise ValueError for an option that PostgreSQL's library does not know; it would say so only when it connects."""
    try:
        make_conninfo(**dict.fromkeys(url.query, ""))
    except psycopg.Error as error:
        raise ValueError(str(error).strip()) from None


def settings_table() -> str:
    """The settings as a Markdown table, generated so that it cannot fall behind."""
    lines = ["| variable | default | meaning |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        default = field.get_default(call_default_factory=True, validated_data={})
        shown = "" if default is None or default in ({}, ()) else f"`{default}`"
        lines.append(f"| `{PREFIX}{name.upper()}` | {shown} | {field.description} |")
    return "\n".join(lines) + "\n"
