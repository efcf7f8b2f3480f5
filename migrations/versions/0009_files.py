"""Files: an index of the archive's records, files that are being archived, and uploads in blocks."""

import sqlalchemy as sa
from alembic import op
from tarn.db.tables import ByCodePoint, Moment

revision = "0009"
down_revision = "0008"


def upgrade():
    op.create_table(
        "files",
        sa.Column("dataset_id", sa.String(length=36), nullable=False),
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("checksum", sa.String(length=64), nullable=False),
        sa.Column("sha1", sa.String(length=40), nullable=False),
        sa.Column(
            "path_head",
            ByCodePoint,
            nullable=False,
            comment="the first 255 characters of the path, because PostgreSQL does not index long texts",
        ),
        sa.Column("path", ByCodePoint, nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("mime_type", sa.Text(), nullable=False),
        sa.Column("created", Moment(), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False, comment="the tenant whose quota it counts towards"),
        sa.Column("origin", sa.String(length=128), nullable=False),
        sa.Column("meta", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["dataset_id"], ["datasets.id"], name=op.f("fk_files_dataset_id")),
        sa.PrimaryKeyConstraint("dataset_id", "id", name=op.f("pk_files")),
        comment="index of the archive's File records",
    )
    op.create_index("ix_files_dataset_id_path_head", "files", ["dataset_id", "path_head"])
    op.create_index("ix_files_dataset_id_checksum", "files", ["dataset_id", "checksum"])
    op.create_table(
        "file_puts",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("dataset_id", sa.String(length=36), nullable=False),
        sa.Column("checksum", sa.String(length=64), nullable=False),
        sa.Column("file_id", sa.String(length=40), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("reserved", sa.BigInteger(), nullable=False, comment="bytes reserved from the tenant's quota"),
        sa.Column("expires", Moment(), nullable=False),
        sa.ForeignKeyConstraint(["dataset_id"], ["datasets.id"], name=op.f("fk_file_puts_dataset_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_file_puts")),
        comment="files that are being archived, whose blobs must not be garbage-collected",
    )
    op.create_index("ix_file_puts_dataset_id_checksum", "file_puts", ["dataset_id", "checksum"])
    op.create_table(
        "uploads",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("dataset_id", sa.String(length=36), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("length", sa.BigInteger(), nullable=False),
        sa.Column(
            "checksum", sa.String(length=64), nullable=True, comment="the expected checksum, if the sender declared it"
        ),
        sa.Column("origin", sa.String(length=128), nullable=True),
        sa.Column("meta", sa.JSON(), nullable=True),
        sa.Column(
            "file", sa.JSON(), nullable=True, comment="the File record that it was committed as; null: it is open"
        ),
        sa.Column("created", Moment(), nullable=False),
        sa.Column("expires", Moment(), nullable=False),
        sa.ForeignKeyConstraint(["dataset_id"], ["datasets.id"], name=op.f("fk_uploads_dataset_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_uploads")),
    )
    op.create_index(op.f("ix_uploads_dataset_id"), "uploads", ["dataset_id"])
    op.create_table(
        "upload_blocks",
        sa.Column("upload", sa.String(length=36), nullable=False),
        sa.Column("start", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("end", sa.BigInteger(), nullable=False),
        sa.Column("part", sa.String(length=64), nullable=False, comment="the name of the object that stores it"),
        sa.ForeignKeyConstraint(["upload"], ["uploads.id"], name=op.f("fk_upload_blocks_upload")),
        sa.PrimaryKeyConstraint("upload", "start", name=op.f("pk_upload_blocks")),
    )
