"""Every SQL table. Alembic's migrations make them; a test holds the two equal."""

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
    """A point in time: aware and UTC on our side, whatever the database keeps."""

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
"""Text in the order of its code points, as SQLite has it, whatever language the database speaks."""

lake = Table(
    "lake",
    metadata,
    Column("id", Id, primary_key=True, comment="the id in lake.json: a database serves one lake"),
)

compatibility = Table(
    "compatibility",
    metadata,
    Column(
        "oldest", String(32), primary_key=True, comment="the oldest revision whose code this database serves; one row"
    ),
)

clock = Table(
    "clock",
    metadata,
    Column("boot", String(64), primary_key=True, comment="which run of the machine it counts in"),
    Column("since", Float, nullable=False, comment="seconds since the machine started, when it said `at`"),
    Column("at", Moment, nullable=False),
    comment="what SQLite, which has no clock of its own, goes by; one row at most",
)

tenants = Table(
    "tenants",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("title", Text, nullable=False),
    Column("created", Moment, nullable=False),
    Column("disabled", Boolean, nullable=False),
    Column("deleted", Moment, comment="names are not given out twice: old tags and queue items bear them"),
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
    Column("digest", String(64), nullable=False, comment="SHA-256 of the key; the key itself is nowhere"),
    Column("created", Moment, nullable=False),
    Column("expires", Moment),
    Column("revoked", Moment),
)

grants = Table(
    "grants",
    metadata,
    Column("id", Id, primary_key=True),
    Column("tenant", ForeignKey("tenants.name"), nullable=False),
    Column("dataset", String(128), nullable=False, comment="a name, with * for any run of characters"),
    Column("level", String(16), nullable=False),
    Column("created", Moment, nullable=False),
    UniqueConstraint("tenant", "dataset", "level"),
)

access_revision = Table(
    "access_revision",
    metadata,
    Column("revision", Id, primary_key=True, comment="one row, drawn anew with every change of who may do what"),
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
    Column("revision", Integer, nullable=False, comment="counts changes of the configuration; its row is their lock"),
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
    Column("commit", BigInteger, nullable=False, comment="the last commit number given out"),
    Column("segment", BigInteger, nullable=False, comment="the segment that is open"),
    Column("rows", BigInteger, nullable=False, comment="committed rows that no snapshot holds yet"),
    Column("size", BigInteger, nullable=False, comment="characters of their values"),
    Column("oldest", Moment, comment="when the oldest of them was committed"),
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
    Column("is_stage", Boolean, nullable=False, comment="a stage has no rows of its own, but those sent to it"),
    Column("stage", ForeignKey("journal_batches.id"), index=True, comment="the stage this request was sent to"),
    Column("segment", BigInteger),
    Column("commit", BigInteger),
    Column("entities", BigInteger, nullable=False),
    Column("rows", BigInteger, nullable=False),
    Column("size", BigInteger, nullable=False, comment="characters of their values"),
    Column("reserved", BigInteger, nullable=False, comment="statements taken from the tenant's quota"),
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
    Column("shard_key", Integer, comment="null: it concerns every entity"),
    Column("id", LargeBinary, comment="the statement's SHA-1, twenty bytes"),
    Column("entity_id", Text),
    Column("canonical_id", Text, comment="null: the entity id"),
    Column("schema", Text),
    Column("prop", Text),
    Column("value", Text),
    Column("lang", Text),
    Column("original_value", Text),
    Column("external", Boolean),
    Column("origin", Text, comment="null in a delete or an erase: every origin"),
    Column("first_seen", BigInteger, comment="microseconds since 1970"),
    Column("last_seen", BigInteger),
    sqlite_with_rowid=False,
)

journal_packs = Table(
    "journal_packs",
    metadata,
    Column("batch", BigInteger, primary_key=True, autoincrement=False),
    Column("position", BigInteger, primary_key=True, autoincrement=False, comment="of its first event"),
    Column("rows", Integer, nullable=False, comment="events in it, whose positions follow on each other"),
    Column("low", Integer, nullable=False, comment="the least shard key of its events"),
    Column("high", Integer, nullable=False, comment="the greatest"),
    Column("has_canonical", Boolean, nullable=False, comment="some name a canonical id, of whatever shard"),
    Column("checksum", BigInteger, nullable=False, comment="CRC-32 of the data"),
    Column("data", LargeBinary, nullable=False, comment="the events: Arrow, see app/journal/packs.py"),
    comment="many events of a batch in one row, beside those in `journal`",
)

journal_rejected = Table(
    "journal_rejected",
    metadata,
    Column("id", Id, primary_key=True),
    Column("dataset_id", ForeignKey("datasets.id"), nullable=False),
    Column("batch", Id, nullable=False, comment="the uid of the batch it came with"),
    Column("tenant", String(64), nullable=False),
    Column("commit", BigInteger, nullable=False),
    Column("position", BigInteger, nullable=False),
    Column("event", JSON, nullable=False, comment="the journal's row as it was, bytes as hexadecimal"),
    Column("reason", Text, nullable=False),
    Column("at", Moment, nullable=False),
    UniqueConstraint("dataset_id", "batch", "position"),
)

snapshot_heads = Table(
    "snapshot_heads",
    metadata,
    Column("dataset_id", ForeignKey("datasets.id"), primary_key=True),
    Column("seq", BigInteger, nullable=False, comment="a dataset made again goes on above the one that had its name"),
    Column("snapshot", Id, comment="null: none yet"),
    Column("content", BigInteger, nullable=False),
    Column("segment", BigInteger, nullable=False, comment="the last segment that is in it"),
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
    Column("expired", Moment, comment="when its manifest was given up; null: it is kept"),
    UniqueConstraint("dataset_id", "id"),
    comment="what the manifests say of themselves, to be found by id, segment or moment",
)

refs = Table(
    "refs",
    metadata,
    Column("dataset_id", ForeignKey("datasets.id"), primary_key=True),
    Column("name", String(128), primary_key=True),
    Column("seq", BigInteger, nullable=False),
    Column("snapshot", Id, nullable=False),
    Column("tenant", String(64), nullable=False, comment="who set it last"),
    Column("updated", Moment, nullable=False),
    comment="named pins on snapshots, mirrored in the layout",
)

leases = Table(
    "leases",
    metadata,
    Column("dataset_id", ForeignKey("datasets.id"), primary_key=True),
    Column("owner", Id, nullable=False),
    Column("token", BigInteger, nullable=False, comment="rises with every holder"),
    Column("expires", Moment, nullable=False),
)

export_leases = Table(
    "export_leases",
    metadata,
    Column("dataset_id", ForeignKey("datasets.id"), primary_key=True),
    Column("owner", Id, nullable=False),
    Column("token", BigInteger, nullable=False, comment="rises with every holder"),
    Column("expires", Moment, nullable=False),
)

exports = Table(
    "exports",
    metadata,
    Column("dataset_id", ForeignKey("datasets.id"), primary_key=True),
    Column("kind", String(16), primary_key=True),
    Column("name", String(64), nullable=False),
    Column("snapshot", Id, comment="null: made of a dataset without snapshots"),
    Column("seq", BigInteger, nullable=False),
    Column("content", BigInteger, nullable=False),
    Column("resolved", Moment, nullable=False, comment="when its snapshot was found to be the head"),
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
    Column("job", Id, nullable=False, comment="the job that did it, so that none does it twice"),
    Column("mapping", String(64), nullable=False, comment="the entity tag that the mapping had"),
    Column("form", JSON, nullable=False, comment="how the file was to be read"),
    Column("processed", Moment, nullable=False),
    Column("result", JSON, nullable=False),
    comment="of each mapping, the last run that was committed",
)

tags = Table(
    "tags",
    metadata,
    Column("dataset_id", ForeignKey("datasets.id"), primary_key=True),
    Column("tenant", String(64), primary_key=True),
    Column("key", String(255), primary_key=True),
    Column("at", Moment, nullable=False),
    Column("value", JSON(none_as_null=True), comment="null: it tells no more than its moment"),
)

locks = Table(
    "locks",
    metadata,
    Column("dataset_id", ForeignKey("datasets.id"), primary_key=True),
    Column("tenant", String(64), primary_key=True),
    Column("name", String(128), primary_key=True),
    Column("id", Id, nullable=False, unique=True),
    Column("holder", Text, nullable=False),
    Column("token", String(64), comment="what its holder shows; null: it is free"),
    Column("fence", BigInteger, nullable=False, comment="rises with every holder"),
    Column("taken", Moment, nullable=False),
    Column("expires", Moment, nullable=False, comment="by the database's clock"),
)

queue_heads = Table(
    "queue_heads",
    metadata,
    Column("dataset_id", ForeignKey("datasets.id"), primary_key=True),
    Column("last", Id, nullable=False, comment="the last id given out; whoever adds an item holds the row"),
)

queue_leases = Table(
    "queue_leases",
    metadata,
    Column("dataset_id", ForeignKey("datasets.id"), primary_key=True),
    Column("owner", Id, nullable=False),
    Column("token", BigInteger, nullable=False, comment="rises with every holder"),
    Column("expires", Moment, nullable=False),
)

queue = Table(
    "queue",
    metadata,
    Column("id", Id, primary_key=True, comment="rises within a dataset in the order of commits, whatever clocks say"),
    Column("dataset_id", ForeignKey("datasets.id"), nullable=False),
    Column("tenant", String(64), nullable=False, comment="who sent it"),
    Column("recipient", String(64), comment="who is to take it; null: the worker does it"),
    Column("shared", Boolean, nullable=False, comment="whether all who may read the dataset may read it"),
    Column("action", String(16), nullable=False),
    Column("resource", String(16), nullable=False),
    Column("origin", String(128)),
    Column("payload", JSON, nullable=False),
    Column("request", String(128), nullable=False),
    Column("state", String(16), nullable=False, comment="pending, done or dead"),
    Column("attempts", Integer, nullable=False),
    Column("created", Moment, nullable=False),
    Column("finished", Moment),
    Column("not_before", Moment, comment="when it may be tried again, if not at once"),
    Column("token", String(64), comment="what its recipient shows; null: it was not taken"),
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
        "path_head", ByCodePoint, nullable=False, comment="its first 255 characters: PostgreSQL indexes no long texts"
    ),
    Column("path", ByCodePoint, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("mime_type", Text, nullable=False),
    Column("created", Moment, nullable=False),
    Column("tenant", String(64), nullable=False, comment="whose quota it counts against"),
    Column("origin", String(128), nullable=False),
    Column("meta", JSON, nullable=False),
    Index("ix_files_dataset_id_path_head", "dataset_id", "path_head"),
    Index("ix_files_dataset_id_checksum", "dataset_id", "checksum"),
    comment="what the File records in the archive say, to be found by path",
)

file_texts = Table(
    "file_texts",
    metadata,
    Column("dataset_id", ForeignKey("datasets.id"), primary_key=True),
    Column("checksum", String(64), primary_key=True),
    Column("origin", String(128), primary_key=True),
    Column("tenant", String(64), nullable=False, comment="whose quota it counts against"),
    Column("size", BigInteger, nullable=False),
    comment="texts of contents, as they are counted; what they say is in the archive",
)

file_puts = Table(
    "file_puts",
    metadata,
    Column("id", Id, primary_key=True),
    Column("dataset_id", ForeignKey("datasets.id"), nullable=False),
    Column("checksum", String(64), nullable=False),
    Column("file_id", String(40), nullable=False),
    Column("tenant", String(64), nullable=False),
    Column("reserved", BigInteger, nullable=False, comment="bytes taken from the tenant's quota"),
    Column("expires", Moment, nullable=False),
    Index("ix_file_puts_dataset_id_checksum", "dataset_id", "checksum"),
    comment="files on their way into the archive, whose blobs nobody may collect",
)

uploads = Table(
    "uploads",
    metadata,
    Column("id", Id, primary_key=True),
    Column("dataset_id", ForeignKey("datasets.id"), nullable=False, index=True),
    Column("tenant", String(64), nullable=False),
    Column("path", Text, nullable=False),
    Column("length", BigInteger, nullable=False),
    Column("checksum", String(64), comment="what the sender says it will be"),
    Column("origin", String(128)),
    Column("meta", JSON),
    Column("file", JSON, comment="the File record that it became; null: it is open"),
    Column("created", Moment, nullable=False),
    Column("expires", Moment, nullable=False),
)

upload_blocks = Table(
    "upload_blocks",
    metadata,
    Column("upload", ForeignKey("uploads.id"), primary_key=True),
    Column("start", BigInteger, primary_key=True, autoincrement=False),
    Column("end", BigInteger, nullable=False),
    Column("part", String(64), nullable=False, comment="the name of the object that holds it"),
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
    Column("dataset_id", ForeignKey("datasets.id"), comment="null: it concerns several"),
    Column("arguments", JSON, nullable=False),
    Column("tenant", String(64), nullable=False),
    Column("request", String(128), nullable=False),
    Column("state", String(16), nullable=False, comment="queued, running, done, failed or cancelled"),
    Column("cancelled", Moment, comment="when somebody asked for it to be given up"),
    Column("created", Moment, nullable=False),
    Column("started", Moment),
    Column("finished", Moment),
    Column("worker", Id),
    Column("heartbeat", Moment),
    Column("attempts", Integer, nullable=False),
    Column("progress", JSON),
    Column("result", JSON),
    Column("problem", JSON),
    Column("not_before", Moment, comment="when a queued job may be taken, if not at once"),
    Column("disturbed", Moment, comment="when an attempt last broke off: what it sent may still be under way"),
    Column("told", Moment, comment="when an event last said how far it is"),
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
    Column("beat", BigInteger, nullable=False, comment="counts its reports"),
    Column(
        "oldest", JSON, nullable=False, comment="by dataset, the oldest snapshot that it reads; 0: nobody knows yet"
    ),
    Column("speaks", JSON, comment="forms of data that it reads; null: those of the first version"),
)

event_heads = Table(
    "event_heads",
    metadata,
    Column("stream", Id, primary_key=True, comment="a dataset's id, or of a job on several datasets its own"),
    Column("last", BigInteger, nullable=False, comment="the last number given out"),
    Column("tail", BigInteger, nullable=False, comment="up to this number nothing is kept any more"),
)

events = Table(
    "events",
    metadata,
    Column("stream", Id, primary_key=True),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("kind", String(32), nullable=False),
    Column("at", Moment, nullable=False, index=True),
    Column("job", Id, comment="the job that it tells of"),
    Column("audience", JSON, comment="tenants that may see it; null: whoever may read the dataset"),
    Column("data", JSON, nullable=False),
    Index("ix_events_job_number", "job", "number"),
    comment="what happened, written in the transaction in which it did",
)

webhooks = Table(
    "webhooks",
    metadata,
    Column("tenant", ForeignKey("tenants.name"), primary_key=True),
    Column("id", Id, nullable=False),
    Column("url", Text, nullable=False),
    Column("secret", Text, nullable=False, comment="as it was given: a signature cannot be made from a digest"),
    Column("kinds", JSON, nullable=False, comment="none: every kind"),
    Column("datasets", JSON, nullable=False, comment="patterns of names"),
    Column("created", Moment, nullable=False),
    Column("updated", Moment, nullable=False),
    Column("state", String(16), nullable=False, comment="active, failing or given_up"),
    Column("attempts", Integer, nullable=False, comment="at the event that is next"),
    Column("problem", Text, comment="why the last attempt failed"),
    Column("next_try", Moment, comment="when to try again, if not at once"),
    Column("delivered", BigInteger, nullable=False),
    Column("failed", BigInteger, nullable=False, comment="attempts, in all"),
    Column("last_delivered", Moment),
    Column("worker", Id, comment="who delivers now"),
    Column("leased_until", Moment),
)

webhook_cursors = Table(
    "webhook_cursors",
    metadata,
    Column("tenant", ForeignKey("webhooks.tenant"), primary_key=True),
    Column("stream", Id, primary_key=True),
    Column("number", BigInteger, nullable=False, comment="the last event that was delivered or is of no interest"),
)
