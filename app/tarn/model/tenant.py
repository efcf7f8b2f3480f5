"""Tenants, their keys, grants and limits, the identity of a request, and strict request bodies."""

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)

from tarn.model.names import DatasetPattern, TenantName
from tarn.settings import RequestRate

ADMIN = TenantName("admin")
"""The tenant of the key that is created at the first start."""

BOOTSTRAP_KEY = "bootstrap"
"""The id of that key. The key itself has no required format, so that an operator may choose it."""


class Level(StrEnum):
    """The level of a grant; each level includes the previous ones."""

    READ = "read"
    WRITE = "write"
    MAINTAIN = "maintain"
    ADMIN = "admin"

    def allows(self, needed: "Level") -> bool:
        order = list(Level)
        return order.index(self) >= order.index(needed)


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must not have control characters")
    return text


Label = Annotated[str, Field(max_length=200), AfterValidator(_printable)]


def _in_utc(moment: datetime) -> datetime:
    # Conversion to other time zones, here or in a database, must not leave the years 1 to 9999.
    if not datetime.min.year < moment.year < datetime.max.year:
        raise ValueError("must be between the years 2 and 9998")
    return moment.astimezone(UTC)


AnyMoment = Annotated[AwareDatetime, AfterValidator(_in_utc)]
"""A moment in UTC that can be converted to every time zone."""


JSON_TYPES: dict[Any, frozenset[type]] = {
    bool: frozenset({bool}),
    int: frozenset({int, float}),
    float: frozenset({int, float}),
    str: frozenset({str}),
    AwareDatetime: frozenset({str}),
}
"""The JSON types that are allowed for each type of field. In JSON, 1.0 is an integer."""

NAMES = {bool: "a boolean", int: "a number", float: "a number", str: "a string"}


class Strict(BaseModel):
    """A request body in which unknown fields and values of another JSON type are errors.

    Pydantic would accept "yes" for true, true for 1, and a number for a moment; the OpenAPI document does not.
    """

    model_config = ConfigDict(extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def has_json_type(cls, value: Any, info: ValidationInfo) -> Any:
        allowed = _kinds_of(cls, str(info.field_name))
        if type(value) in NAMES and allowed and type(value) not in allowed:
            raise ValueError(f"must be {' or '.join(sorted({NAMES[kind] for kind in allowed}))}")
        return value


@cache
def _kinds_of(model: type[BaseModel], name: str) -> frozenset[type]:
    """Return the scalar JSON types that a field accepts; empty: not checked here."""
    field = model.model_fields[name]
    has_own_validator = any(isinstance(item, BeforeValidator) for item in field.metadata)
    return frozenset() if has_own_validator else _kinds(field.annotation)


def _kinds(annotation: Any) -> frozenset[type]:
    if get_origin(annotation) is Literal:
        return frozenset(type(value) for value in get_args(annotation))
    if get_origin(annotation) is Annotated:
        kind, *more = get_args(annotation)
        return frozenset() if any(isinstance(item, BeforeValidator) for item in more) else _kinds(kind)
    if get_origin(annotation) in (Union, UnionType):
        return frozenset().union(*(_kinds(inner) for inner in get_args(annotation)))
    if isinstance(annotation, type) and issubclass(annotation, str):
        return JSON_TYPES[str]
    return JSON_TYPES.get(annotation, frozenset())


class NewTenant(Strict):
    name: TenantName
    title: Label = ""


class TenantChange(Strict):
    title: Label | None = None
    disabled: bool | None = None


class Tenant(BaseModel):
    """An application with its own keys and grants."""

    name: TenantName
    title: str
    created: datetime
    disabled: bool


class NewKey(Strict):
    label: Label = ""
    expires: AnyMoment | None = None


class Key(BaseModel):
    """An API key, without its secret."""

    id: str
    tenant: TenantName
    label: str
    created: datetime
    expires: datetime | None
    revoked: datetime | None


class CreatedKey(Key):
    """A new key with its secret, which is shown only once."""

    key: str


class NewGrant(Strict):
    dataset: DatasetPattern
    level: Level


class Grant(BaseModel):
    """The level of a tenant on the datasets that match a pattern."""

    id: str
    tenant: TenantName
    dataset: DatasetPattern
    level: Level
    created: datetime


class NewLimits(Strict):
    """A tenant's own limits; null means the server's default."""

    rate_limit: RequestRate | None = None
    rate_burst: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    quota_statements: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    quota_bytes: Annotated[int, Field(ge=0, lt=2**63)] | None = None


class Limits(BaseModel):
    """The effective limits of a tenant, and the usage of its quotas. A quota of null means no quota."""

    rate_limit: float
    rate_burst: int
    quota_statements: int | None
    quota_bytes: int | None
    used_statements: int
    used_bytes: int


class Outcome(StrEnum):
    DONE = "done"
    DENIED = "denied"


class AuditEntry(BaseModel):
    """One write, denial or administrative action."""

    id: str
    at: datetime
    tenant: str | None
    key: str | None
    action: str
    target: str
    outcome: Outcome
    request: str
    detail: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Identity:
    """The authenticated caller: its tenant, key, grants and rate limit."""

    tenant: TenantName
    key: str
    grants: tuple[tuple[DatasetPattern, Level], ...]
    rate_limit: float
    rate_burst: int

    def level_on(self, dataset: str) -> Level | None:
        """Return the highest level granted on a dataset; None: the dataset is not visible to this caller."""
        order = list(Level)
        levels = [level for pattern, level in self.grants if pattern.matches(dataset)]
        return max(levels, key=order.index, default=None)

    @property
    def administers_lake(self) -> bool:
        return any(pattern == "*" and level is Level.ADMIN for pattern, level in self.grants)
