"""Validated name types (dataset, tenant, origin, path, …) that are safe in storage paths, SQL and logs."""

import re
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Self

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

LAKEHOUSE = "lakehouse"
"""The reserved tenant name of Tarn itself."""

DRIVE = re.compile(r"[A-Za-z]:")

SNAPSHOT_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class Name(str):
    """A string that was validated by its class's rule. The constructor raises ValueError."""

    __slots__ = ()
    what: ClassVar[str]
    rule: ClassVar[str]
    pattern: ClassVar[str]
    longest: ClassVar[int] = 128
    reserved: ClassVar[frozenset[str]] = frozenset()

    def __new__(cls, value: str) -> Self:
        if isinstance(value, cls):
            return value
        if len(value) > cls.longest:
            raise ValueError(f"{cls.what} is {len(value)} characters long, at most {cls.longest} are allowed")
        if not re.fullmatch(cls.pattern, value):
            raise ValueError(f"{cls.what} {value!r} {cls.rule}")
        if value in cls.reserved:
            raise ValueError(f"{cls.what} {value!r} is reserved")
        cls.check(value)
        return super().__new__(cls, value)

    @classmethod
    def check(cls, value: str) -> None:
        """Raise ValueError for violations of rules that the pattern cannot express."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(
            cls, core_schema.str_schema(strict=True), serialization=core_schema.to_string_ser_schema()
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"type": "string", "pattern": f"^{cls.pattern}$", "maxLength": cls.longest, "minLength": 1}


class DatasetName(Name):
    """A dataset's name: a folder of the lake. FtM requires that a name equals its slug."""

    what = "dataset name"
    rule = "must be lower-case letters, digits and single underscores, and start and end with a letter or digit"
    pattern = r"[a-z0-9]+(_[a-z0-9]+)*"
    # `versions` is a folder of the lake itself; FtM uses `undefined` for no dataset.
    reserved = frozenset({LAKEHOUSE, "versions", "undefined"})

    @classmethod
    def check(cls, value: str) -> None:
        # Importing this takes a second; executors, whose names were checked before, do not need it.
        from followthemoney.dataset.util import dataset_name_check

        dataset_name_check(value)


class DatasetPattern(Name):
    """The datasets of a grant: a dataset name in which `*` matches any characters."""

    what = "dataset pattern"
    rule = "must be lower-case letters, digits, underscores and *"
    pattern = r"[a-z0-9_*]+"

    def matches(self, name: str) -> bool:
        return fnmatchcase(name, self)


class TenantName(Name):
    """A tenant's name: a folder under tags, locks and queue."""

    what = "tenant name"
    rule = "must be lower-case letters, digits, - and _, and start with a letter or digit"
    pattern = r"[a-z0-9][a-z0-9_-]*"
    longest = 64
    reserved = frozenset({LAKEHOUSE})


class Origin(Name):
    """The process that asserted a statement, such as `crawl` or `mapping:{hash}`; a partition of the store."""

    what = "origin"
    rule = "must be letters, digits and . _ : -, and start with a letter or digit"
    pattern = r"[A-Za-z0-9][A-Za-z0-9._:-]*"


class Checksum(Name):
    """A SHA-256 in lower-case hexadecimal."""

    what = "checksum"
    rule = "must be 64 lower-case hexadecimal digits"
    pattern = r"[0-9a-f]{64}"
    longest = 64


class FileId(Name):
    """A file's id: the SHA-1 of its dataset, path and content, in lower-case hexadecimal."""

    what = "file id"
    rule = "must be 40 lower-case hexadecimal digits"
    pattern = r"[0-9a-f]{40}"
    longest = 40


class FilePath(Name):
    """The relative path of a source file at its origin: names in any script, joined by slashes.

    It is stored unchanged, without Unicode normalization, and is not a storage path. Shells, browsers and Windows may
    read it later: for all of them it must be a single line and must not leave its root folder.
    """

    what = "file path"
    rule = (
        "must be names joined by single slashes, with none at either end, "
        "and without control characters, line separators and backslashes"
    )
    pattern = r"[^/\\\x00-\x1f\x7f-\x9f\u2028\u2029]+(/[^/\\\x00-\x1f\x7f-\x9f\u2028\u2029]+)*"
    longest = 4096

    @classmethod
    def check(cls, value: str) -> None:
        try:
            size = len(value.encode())
        except UnicodeEncodeError:
            raise ValueError(f"file path {value!r} contains an unpaired surrogate") from None
        if size > cls.longest:
            raise ValueError(f"file path is {size} bytes long, at most {cls.longest} are allowed")
        segments = value.split("/")
        if not {".", ".."}.isdisjoint(segments):
            raise ValueError(f"file path {value!r} must not have . or .. for a name")
        if DRIVE.fullmatch(segments[0]):
            raise ValueError(f"file path {value!r} must not begin with a drive")

    @property
    def name(self) -> str:
        """Return its last segment."""
        return self.rsplit("/", 1)[-1]

    @property
    def folders(self) -> list["FilePath"]:
        """Return its parent folders, outermost first."""
        # Not validated again: each prefix of a valid path is valid, and a path may have two thousand of them.
        return [str.__new__(FilePath, self[: slash.start()]) for slash in re.finditer("/", self)]

    @property
    def parent(self) -> "FilePath | None":
        """Return its parent folder, if it has one."""
        above, slash, _ = self.rpartition("/")
        return str.__new__(FilePath, above) if slash else None


class RefName(Name):
    """A named pin on a snapshot. It starts with a letter, so it is no number and no time, and it is no snapshot id."""

    what = "ref name"
    rule = "must be letters, digits and . _ -, and start with a letter"
    pattern = r"[A-Za-z][A-Za-z0-9._-]*"
    reserved = frozenset({"latest"})

    @classmethod
    def check(cls, value: str) -> None:
        if SNAPSHOT_ID.fullmatch(value):
            raise ValueError(f"ref name {value!r} looks like a snapshot's id")


class LockName(Name):
    """A named lease of a tenant."""

    what = "lock name"
    rule = "must be letters, digits and . _ -, and start with a letter or digit"
    pattern = r"[A-Za-z0-9][A-Za-z0-9._-]*"


class TagKey(Name):
    """A tag's key: one or more segments joined by slashes."""

    what = "tag key"
    rule = "must be segments of letters, digits and . _ : -, each starting with a letter or digit, joined by /"
    pattern = r"[A-Za-z0-9][A-Za-z0-9._:-]*(/[A-Za-z0-9][A-Za-z0-9._:-]*)*"
    longest = 255
    longest_segment: ClassVar[int] = 200
    """A segment is a file name on disk, to which an unfinished write adds a suffix."""

    @classmethod
    def check(cls, value: str) -> None:
        longest = max(map(len, value.split("/")))
        if longest > cls.longest_segment:
            raise ValueError(
                f"tag key has a segment of {longest} characters, at most {cls.longest_segment} are allowed"
            )


class FileName(Name):
    """The name of a versioned document: one path segment."""

    what = "file name"
    rule = "must be letters, digits and . _ -, and start with a letter or digit"
    pattern = r"[A-Za-z0-9][A-Za-z0-9._-]*"
