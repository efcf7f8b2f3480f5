"""Findings of a verification: the closed list of kinds."""

from enum import StrEnum

from pydantic import BaseModel, Field


class FindingKind(StrEnum):
    """The kind of an inconsistency."""

    # History recorded in SQL
    HEAD_WRONG = "head-wrong"
    RECORD_MISSING = "record-missing"
    RECORD_WRONG = "record-wrong"
    EXPIRY_WRONG = "expiry-wrong"
    REF_DANGLING = "ref-dangling"
    SNAPSHOT_UNRECORDED = "snapshot-unrecorded"

    # Manifests
    MANIFEST_MISSING = "manifest-missing"
    MANIFEST_INVALID = "manifest-invalid"
    MANIFEST_FOREIGN = "manifest-foreign"
    MANIFEST_STRAY = "manifest-stray"
    PARENT_WRONG = "parent-wrong"
    ORDER_WRONG = "order-wrong"
    COUNTS_WRONG = "counts-wrong"
    FILE_LIST_WRONG = "file-list-wrong"

    # Data files
    FILE_MISSING = "file-missing"
    FILE_SIZE = "file-size"
    FILE_CHECKSUM = "file-checksum"
    FILE_UNREADABLE = "file-unreadable"
    FILE_ROWS = "file-rows"
    FILE_SCHEMA = "file-schema"

    # Delta logs
    DELTA_UNREADABLE = "delta-unreadable"
    DELTA_DIFFERS = "delta-differs"
    DELTA_AHEAD = "delta-ahead"

    # Rows of the head
    ROWS_UNSORTED = "rows-unsorted"
    BOUNDS_WRONG = "bounds-wrong"
    MARK_DANGLING = "mark-dangling"
    LIVE_WRONG = "live-wrong"

    # Data as it was sent
    ENTITIES_INVALID = "entities-invalid"

    # The journal
    SEGMENT_PASSED = "segment-passed"
    SEGMENT_WRONG = "segment-wrong"
    JOURNAL_MISCOUNTED = "journal-miscounted"
    JOURNAL_ROWS = "journal-rows"
    COMMIT_NUMBERS = "commit-numbers"

    # The archive
    FILE_UNRECORDED = "file-unrecorded"
    FILE_RECORD_MISSING = "file-record-missing"
    BLOB_MISSING = "blob-missing"
    BLOB_SIZE = "blob-size"
    TEXT_MISCOUNTED = "text-miscounted"

    # Documents
    CONFIG_MISSING = "config-missing"
    CONFIG_INVALID = "config-invalid"
    CONFIG_FOREIGN = "config-foreign"
    HINT_WRONG = "hint-wrong"

    @property
    def harmless(self) -> bool:
        """Return whether it causes no loss or misread: the next writer or vacuum corrects it, nothing depends on it, or
        the data is stored as it was sent and only its writers can change it."""
        return self in HARMLESS

    @property
    def about_data(self) -> bool:
        """Return whether it concerns the data, not its storage: no repair changes it, only the data's writers can."""
        return self is FindingKind.ENTITIES_INVALID


HARMLESS = frozenset(
    {
        FindingKind.SNAPSHOT_UNRECORDED,
        FindingKind.MANIFEST_STRAY,
        FindingKind.DELTA_AHEAD,
        FindingKind.HINT_WRONG,
        FindingKind.ENTITIES_INVALID,
        FindingKind.TEXT_MISCOUNTED,
    }
)


class Finding(BaseModel):
    """One inconsistency that a verification found."""

    kind: FindingKind
    path: str | None = Field(description="The file it concerns, relative to the lake's root; null: none.")
    detail: str
    harmless: bool = Field(
        description="No data is lost: the next writer corrects it, nothing depends on it, or the data is stored as it "
        "was sent."
    )
    repaired: bool = Field(description="It was repaired: a second verification does not find it.")
    count: int | None = Field(None, description="For `entities-invalid`: number of entities that do not assemble.")
    ids: list[str] = Field([], description="For `entities-invalid`: the first ten ids, sorted.")
