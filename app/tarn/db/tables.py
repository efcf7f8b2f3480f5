"""SQLAlchemy definitions of every SQL table. Alembic's migrations create them; a test compares the two."""

from datetime import UTC, datetime

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Dialect,
    Float,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    text,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)


class Moment(TypeDecorator[datetime]):
    """A timestamp column: timezone-aware UTC in Python, on either database."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        value = value.astimezone(UTC)
        return value.replace(tzinfo=None) if dialect.name == "sqlite" else value

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


Id = String(36)

ByCodePoint = Text().with_variant(Text(collation="C"), "postgresql")
"""Text that sorts by code point on either database, whatever PostgreSQL's collation."""

lake = Table(
    "lake",
    metadata,
    Column("id", Id, primary_key=True, comment="the id in lake.json, because a database serves one lake"),
)

compatibility = Table(
    "compatibility",
    metadata,
    Column(
        "oldest", String(32), primary_key=True, comment="the oldest revision whose code this database supports; one row"
    ),
)

clock = Table(
    "clock",
    metadata,
    Column("boot", String(64), primary_key=True, comment="id of the machine's boot in which `since` was counted"),
    Column("since", Float, nullable=False, comment="seconds since the machine started, at the time `at`"),
    Column("at", Moment, nullable=False),
    comment="the database clock of SQLite, which has none of its own; at most one row",
)

tenants = Table(
    "tenants",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("title", Text, nullable=False),
    Column("created", Moment, nullable=False),
    Column("disabled", Boolean, nullable=False),
    Column("deleted", Moment, comment="names are not reused, because old tags and queue items have them"),
    Column("rate_limit", Float),
    Column("rate_burst", Integer),
    Column("quota_statements", BigInteger),
    Column("quota_bytes", BigInteger),
    Column("used_statements", BigInteger, nullable=False),
    Column("used_bytes", BigInteger, nullable=False),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", Id, primary_key=True),
    Column("tenant", ForeignKey("tenants.name"), nullable=False, index=True),
    Column("label", Text, nullable=False),
    Column("digest", String(64), nullable=False, comment="SHA-256 of the key, which is not stored"),
    Column("created", Moment, nullable=False),
    Column("expires", Moment),
    Column("revoked", Moment),
)

grants = Table(
    "grants",
    metadata,
    Column("id", Id, primary_key=True),
    Column("tenant", ForeignKey("tenants.name"), nullable=False),
    Column("dataset", String(128), nullable=False, comment="a name or a pattern, in which * matches any characters"),
    Column("level", String(16), nullable=False),
    Column("created", Moment, nullable=False),
    UniqueConstraint("tenant", "dataset", "level"),
)

access_revision = Table(
    "access_revision",
    metadata,
    Column("revision", Id, primary_key=True, comment="one row; a new random value with every change of access rights"),
)

audit = Table(
    "audit",
    metadata,
    Column("id", Id, primary_key=True),
    Column("at", Moment, nullable=False),
    Column("tenant", String(64)),
    Column("key", Id),
    Column("action", String(64), nullable=False),
    Column("target", Text, nullable=False),
    Column("outcome", String(16), nullable=False),
    Column("request", String(128), nullable=False),
    Column("detail", JSON, nullable=False),
    Index("ix_audit_tenant_id", "tenant", "id"),
)

datasets = Table(
    "datasets",
    metadata,
    Column("id", Id, primary_key=True),
    Column("name", String(128), nullable=False),
    Column("state", String(16), nullable=False, comment="active, deleting or deleted"),
    Column("created", Moment, nullable=False),
    Column(
        "revision",
        Integer,
        nullable=False,
        comment="number of changes of the configuration, which are serialized by locking this row",
    ),
    Index(
        "uq_datasets_name",
        "name",
        unique=True,
        sqlite_where=text("state <> 'deleted'"),
        postgresql_where=text("state <> 'deleted'"),
    ),
)

journal_head = Table(
    "journal_head",
    metadata,
    Column("dataset_id", ForeignKey("datasets.id"), primary_key=True),
    Column("commit", BigInteger, nullable=False, comment="the last commit number that was assigned"),
    Column("segment", BigInteger, nullable=False, comment="the open segment"),
    Column("rows", BigInteger, nullable=False, comment="committed rows that are not in a snapshot"),
    Column("size", BigInteger, nullable=False, comment="total characters of their values"),
    Column("oldest", Moment, comment="when the oldest of these rows was committed"),
)

journal_batches = Table(
    "journal_batches",
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), Identity(), primary_key=True),
    Column("uid", Id, nullable=False, unique=True),
    Column("dataset_id", ForeignKey("datasets.id"), nullable=False),
    Column("tenant", String(64), nullable=False),
    Column("origin", String(128)),
    Column("state", String(16), nullable=False, comment="open, staged, committed, aborted or done"),
    Column("is_stage", Boolean, nullable=False, comment="a stage has no rows, only batches that refer to it"),
    Column("stage", ForeignKey("journal_batches.id"), index=True, comment="the stage that the batch belongs to"),
    Column("segment", BigInteger),
    Column("commit", BigInteger),
    Column("entities", BigInteger, nullable=False),
    Column("rows", BigInteger, nullable=False),
    Column("size", BigInteger, nullable=False, comment="total characters of their values"),
    Column("reserved", BigInteger, nullable=False, comment="statements reserved from the tenant's quota"),
    Column("message", Text),
    Column("metadata", JSON, nullable=False),
    Column("created", Moment, nullable=False),
    Column("expires", Moment, nullable=False),
    Index("ix_journal_batches_dataset_id_state_segment", "dataset_id", "state", "segment"),
    Index("ix_journal_batches_dataset_id_commit", "dataset_id", "commit"),
    Index("ix_journal_batches_state_expires", "state", "expires"),
)

journal = Table(
    "journal",
    metadata,
    Column("batch", BigInteger, primary_key=True, autoincrement=False),
    Column("position", BigInteger, primary_key=True, autoincrement=False),
    Column("kind", SmallInteger, nullable=False, comment="1 add, 2 delete, 3 erase"),
    Column("shard_key", Integer, comment="null: the event concerns every entity"),
    Column("id", LargeBinary, comment="the statement's SHA-1, twenty bytes"),
    Column("entity_id", Text),
    Column("canonical_id", Text, comment="null: the same as the entity id"),
    Column("schema", Text),
    Column("prop", Text),
    Column("value", Text),
    Column("lang", Text),
    Column("original_value", Text),
    Column("external", Boolean),
    Column("origin", Text, comment="null in a delete or erase: every origin"),
    Column("first_seen", BigInteger, comment="microseconds since 1970"),
    Column("last_seen", BigInteger),
    sqlite_with_rowid=False,
)

journal_packs = Table(
    "journal_packs",
    metadata,
    Column("batch", BigInteger, primary_key=True, autoincrement=False),
    Column("position", BigInteger, primary_key=True, autoincrement=False, comment="position of its first event"),
    Column("rows", Integer, nullable=False, comment="number of events, which have consecutive positions"),
    Column("low", Integer, nullable=False, comment="the lowest shard key of its events"),
    Column("high", Integer, nullable=False, comment="the greatest shard key of its events"),
    Column("has_canonical", Boolean, nullable=False, comment="whether any event has a canonical id"),
    Column("checksum", BigInteger, nullable=False, comment="CRC-32 of the data"),
    Column("data", LargeBinary, nullable=False, comment="the events in Arrow format, see app/tarn/journal/packs.py"),
    comment="events of batches, many in one row; others are in `journal`",
)

journal_rejected = Table(
    "journal_rejected",
    metadata,
    Column("id", Id, primary_key=True),
    Column("dataset_id", ForeignKey("datasets.id"), nullable=False),
    Column("batch", Id, nullable=False, comment="the uid of its batch"),
    Column("tenant", String(64), nullable=False),
    Column("commit", BigInteger, nullable=False),
    Column("position", BigInteger, nullable=False),
    Column("event", JSON, nullable=False, comment="the row of the journal, bytes as hexadecimal"),
    Column("reason", Text, nullable=False),
    Column("at", Moment, nullable=False),
    UniqueConstraint("dataset_id", "batch", "position"),
)

snapshot_heads = Table(
    "snapshot_heads",
    metadata,
    Column("dataset_id", ForeignKey("datasets.id"), primary_key=True),
    Column("seq", BigInteger, nullable=False, comment="starts above that of an earlier dataset of the same name"),
    Column("snapshot", Id, comment="null: there is none yet"),
    Column("content", BigInteger, nullable=False),
    Column("segment", BigInteger, nullable=False, comment="the last segment that it includes"),
)

snapshots = Table(
    "snapshots",
    metadata,
    Column("dataset_id", ForeignKey("datasets.id"), primary_key=True),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("id", Id, nullable=False),
    Column("content", BigInteger, nullable=False),
    Column("segment", BigInteger, nullable=False),
    Column("created", Moment, nullable=False),
    Column("expired", Moment, comment="when the snapshot was expired; null: it is kept"),
    UniqueConstraint("dataset_id", "id"),
    comment="index of the manifests",
)

refs = Table(
    "refs",
    metadata,
    Column("dataset_id", ForeignKey("datasets.id"), primary_key=True),
    Column("name", String(128), primary_key=True),
    Column("seq", BigInteger, nullable=False),
    Column("snapshot", Id, nullable=False),
    Column("tenant", String(64), nullable=False, comment="the tenant that last set it"),
    Column("updated", Moment, nullable=False),
    comment="names that keep a snapshot, mirrored in the layout",
)

leases = Table(
    "leases",
    metadata,
    Column("dataset_id", ForeignKey("datasets.id"), primary_key=True),
    Column("owner", Id, nullable=False),
    Column("token", BigInteger, nullable=False, comment="fencing number, rises with every holder"),
    Column("expires", Moment, nullable=False),
)

export_leases = Table(
    "export_leases",
    metadata,
    Column("dataset_id", ForeignKey("datasets.id"), primary_key=True),
    Column("owner", Id, nullable=False),
    Column("token", BigInteger, nullable=False, comment="fencing number, rises with every holder"),
    Column("expires", Moment, nullable=False),
)

exports = Table(
    "exports",
    metadata,
    Column("dataset_id", ForeignKey("datasets.id"), primary_key=True),
    Column("kind", String(16), primary_key=True),
    Column("name", String(64), nullable=False),
    Column("snapshot", Id, comment="null: the dataset had no snapshot"),
    Column("seq", BigInteger, nullable=False),
    Column("content", BigInteger, nullable=False),
    Column("resolved", Moment, nullable=False, comment="when its snapshot was resolved as the head"),
    Column("made", Moment, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("sha1", String(40), nullable=False),
    Column("version", String(32), nullable=False),
    Column("detail", JSON, nullable=False),
)

mapping_runs = Table(
    "mapping_runs",
    metadata,
    Column("dataset_id", ForeignKey("datasets.id"), primary_key=True),
    Column("content_hash", String(64), primary_key=True),
    Column("job", Id, nullable=False, comment="the job that ran it, so that no job runs it twice"),
    Column("mapping", String(64), nullable=False, comment="the mapping's entity tag at the time of the run"),
    Column("form", JSON, nullable=False, comment="options with which the file was read"),
    Column("processed", Moment, nullable=False),
    Column("result", JSON, nullable=False),
    comment="the last committed run of each mapping",
)

tags = Table(
    "tags",
    metadata,
    Column("dataset_id", ForeignKey("datasets.id"), primary_key=True),
    Column("tenant", String(64), primary_key=True),
    Column("key", String(255), primary_key=True),
    Column("at", Moment, nullable=False),
    Column("value", JSON(none_as_null=True), comment="null: the tag has only a timestamp"),
)

locks = Table(
    "locks",
    metadata,
    Column("dataset_id", ForeignKey("datasets.id"), primary_key=True),
    Column("tenant", String(64), primary_key=True),
    Column("name", String(128), primary_key=True),
    Column("id", Id, nullable=False, unique=True),
    Column("holder", Text, nullable=False),
    Column("token", String(64), comment="secret that proves the lock is held; null: the lock is free"),
    Column("fence", BigInteger, nullable=False, comment="fencing number, rises with every holder"),
    Column("taken", Moment, nullable=False),
    Column("expires", Moment, nullable=False, comment="compared with the database's clock"),
)

queue_heads = Table(
    "queue_heads",
    metadata,
    Column("dataset_id", ForeignKey("datasets.id"), primary_key=True),
    Column(
        "last",
        Id,
        nullable=False,
        comment="the last id that was assigned; a transaction that adds an item locks the row",
    ),
)

queue_leases = Table(
    "queue_leases",
    metadata,
    Column("dataset_id", ForeignKey("datasets.id"), primary_key=True),
    Column("owner", Id, nullable=False),
    Column("token", BigInteger, nullable=False, comment="fencing number, rises with every holder"),
    Column("expires", Moment, nullable=False),
)

queue = Table(
    "queue",
    metadata,
    Column("id", Id, primary_key=True, comment="rises within a dataset in the order of commits, independent of clocks"),
    Column("dataset_id", ForeignKey("datasets.id"), nullable=False),
    Column("tenant", String(64), nullable=False, comment="the tenant that sent it"),
    Column("recipient", String(64), comment="the tenant that it is addressed to; null: the worker processes it"),
    Column("shared", Boolean, nullable=False, comment="whether every tenant that may read the dataset may read it"),
    Column("action", String(16), nullable=False),
    Column("resource", String(16), nullable=False),
    Column("origin", String(128)),
    Column("payload", JSON, nullable=False),
    Column("request", String(128), nullable=False),
    Column("state", String(16), nullable=False, comment="pending, done or dead"),
    Column("attempts", Integer, nullable=False),
    Column("created", Moment, nullable=False),
    Column("finished", Moment),
    Column("not_before", Moment, comment="earliest time for the next attempt; null: at once"),
    Column("token", String(64), comment="secret that proves the lease; null: the item was not taken"),
    Column("leased_until", Moment),
    Column("problem", JSON(none_as_null=True)),
    Index("ix_queue_state_recipient_dataset_id_id", "state", "recipient", "dataset_id", "id"),
    Index("ix_queue_dataset_id_tenant_id", "dataset_id", "tenant", "id"),
    Index("ix_queue_dataset_id_tenant_state", "dataset_id", "tenant", "state"),
    Index("ix_queue_dataset_id_recipient_id", "dataset_id", "recipient", "id"),
    Index("ix_queue_state_finished", "state", "finished"),
)

files = Table(
    "files",
    metadata,
    Column("dataset_id", ForeignKey("datasets.id"), primary_key=True),
    Column("id", String(40), primary_key=True),
    Column("checksum", String(64), nullable=False),
    Column("sha1", String(40), nullable=False),
    Column(
        "path_head",
        ByCodePoint,
        nullable=False,
        comment="the first 255 characters of the path, because PostgreSQL does not index long texts",
    ),
    Column("path", ByCodePoint, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("mime_type", Text, nullable=False),
    Column("created", Moment, nullable=False),
    Column("tenant", String(64), nullable=False, comment="the tenant whose quota it counts towards"),
    Column("origin", String(128), nullable=False),
    Column("meta", JSON, nullable=False),
    Index("ix_files_dataset_id_path_head", "dataset_id", "path_head"),
    Index("ix_files_dataset_id_checksum", "dataset_id", "checksum"),
    comment="index of the archive's File records",
)

file_texts = Table(
    "file_texts",
    metadata,
    Column("dataset_id", ForeignKey("datasets.id"), primary_key=True),
    Column("checksum", String(64), primary_key=True),
    Column("origin", String(128), primary_key=True),
    Column("tenant", String(64), nullable=False, comment="the tenant whose quota it counts towards"),
    Column("size", BigInteger, nullable=False),
    comment="sizes of extracted texts, for quotas; the texts are in the archive",
)

file_puts = Table(
    "file_puts",
    metadata,
    Column("id", Id, primary_key=True),
    Column("dataset_id", ForeignKey("datasets.id"), nullable=False),
    Column("checksum", String(64), nullable=False),
    Column("file_id", String(40), nullable=False),
    Column("tenant", String(64), nullable=False),
    Column("reserved", BigInteger, nullable=False, comment="bytes reserved from the tenant's quota"),
    Column("expires", Moment, nullable=False),
    Index("ix_file_puts_dataset_id_checksum", "dataset_id", "checksum"),
    comment="files that are being archived, whose blobs must not be garbage-collected",
)

uploads = Table(
    "uploads",
    metadata,
    Column("id", Id, primary_key=True),
    Column("dataset_id", ForeignKey("datasets.id"), nullable=False, index=True),
    Column("tenant", String(64), nullable=False),
    Column("path", Text, nullable=False),
    Column("length", BigInteger, nullable=False),
    Column("checksum", String(64), comment="the expected checksum, if the sender declared it"),
    Column("origin", String(128)),
    Column("meta", JSON),
    Column("file", JSON, comment="the File record that it was committed as; null: it is open"),
    Column("created", Moment, nullable=False),
    Column("expires", Moment, nullable=False),
)

upload_blocks = Table(
    "upload_blocks",
    metadata,
    Column("upload", ForeignKey("uploads.id"), primary_key=True),
    Column("start", BigInteger, primary_key=True, autoincrement=False),
    Column("end", BigInteger, nullable=False),
    Column("part", String(64), nullable=False, comment="the name of the object that stores it"),
)

idempotency = Table(
    "idempotency",
    metadata,
    Column("tenant", String(64), primary_key=True),
    Column("key", String(255), primary_key=True),
    Column("fingerprint", String(64), nullable=False),
    Column("status", Integer, nullable=False),
    Column("answer", JSON, nullable=False),
    Column("created", Moment, nullable=False, index=True),
)

jobs = Table(
    "jobs",
    metadata,
    Column("id", Id, primary_key=True),
    Column("operation", String(32), nullable=False),
    Column("dataset_id", ForeignKey("datasets.id"), comment="null: the job concerns several datasets"),
    Column("arguments", JSON, nullable=False),
    Column("tenant", String(64), nullable=False),
    Column("request", String(128), nullable=False),
    Column("state", String(16), nullable=False, comment="queued, running, done, failed or cancelled"),
    Column("cancelled", Moment, comment="when cancellation was requested"),
    Column("created", Moment, nullable=False),
    Column("started", Moment),
    Column("finished", Moment),
    Column("worker", Id),
    Column("heartbeat", Moment),
    Column("attempts", Integer, nullable=False),
    Column("progress", JSON),
    Column("result", JSON),
    Column("problem", JSON),
    Column("not_before", Moment, comment="earliest time for the next attempt; null: at once"),
    Column(
        "disturbed", Moment, comment="when an attempt last ended abnormally: its requests to the store may still arrive"
    ),
    Column("told", Moment, comment="when the last progress event was recorded"),
    Index("ix_jobs_state_id", "state", "id"),
    Index("ix_jobs_tenant_id", "tenant", "id"),
    Index("ix_jobs_tenant_started", "tenant", "started"),
)

workers = Table(
    "workers",
    metadata,
    Column("id", Id, primary_key=True),
    Column("host", Text, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("started", Moment, nullable=False),
    Column("seen", Moment, nullable=False),
)

readers = Table(
    "readers",
    metadata,
    Column("id", Id, primary_key=True),
    Column("host", Text, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("seen", Moment, nullable=False),
    Column("beat", BigInteger, nullable=False, comment="number of heartbeats"),
    Column("oldest", JSON, nullable=False, comment="the oldest snapshot that it reads, by dataset; 0: not known yet"),
    Column("speaks", JSON, comment="data formats that it reads; null: those of the first version"),
)

event_heads = Table(
    "event_heads",
    metadata,
    Column("stream", Id, primary_key=True, comment="a dataset's id; for a job on several datasets, the job's"),
    Column("last", BigInteger, nullable=False, comment="the last number that was assigned"),
    Column("tail", BigInteger, nullable=False, comment="events up to this number are deleted"),
)

events = Table(
    "events",
    metadata,
    Column("stream", Id, primary_key=True),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("kind", String(32), nullable=False),
    Column("at", Moment, nullable=False, index=True),
    Column("job", Id, comment="the job that it is about"),
    Column("audience", JSON, comment="tenants that may see it; null: all that may read the dataset"),
    Column("data", JSON, nullable=False),
    Index("ix_events_job_number", "job", "number"),
    comment="the outbox: each event is written in the transaction of the change that it reports",
)

webhooks = Table(
    "webhooks",
    metadata,
    Column("tenant", ForeignKey("tenants.name"), primary_key=True),
    Column("id", Id, nullable=False),
    Column("url", Text, nullable=False),
    Column("secret", Text, nullable=False, comment="in plain text: deliveries are signed with it"),
    Column("kinds", JSON, nullable=False, comment="an empty list means every kind"),
    Column("datasets", JSON, nullable=False, comment="patterns of dataset names"),
    Column("created", Moment, nullable=False),
    Column("updated", Moment, nullable=False),
    Column("state", String(16), nullable=False, comment="active, failing or given_up"),
    Column("attempts", Integer, nullable=False, comment="failed attempts to deliver the next event"),
    Column("problem", Text, comment="why the last attempt failed"),
    Column("next_try", Moment, comment="earliest time for the next attempt; null: at once"),
    Column("delivered", BigInteger, nullable=False),
    Column("failed", BigInteger, nullable=False, comment="failed attempts since the webhook was created"),
    Column("last_delivered", Moment),
    Column("worker", Id, comment="the worker that holds the lease"),
    Column("leased_until", Moment),
)

webhook_cursors = Table(
    "webhook_cursors",
    metadata,
    Column("tenant", ForeignKey("webhooks.tenant"), primary_key=True),
    Column("stream", Id, primary_key=True),
    Column("number", BigInteger, nullable=False, comment="the last event that was delivered or skipped"),
)
