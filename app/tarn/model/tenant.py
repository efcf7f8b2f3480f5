"""Tenants, their keys, grants and limits, and the identity a request has."""

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
"""The tenant of the key that is made at the first start."""

BOOTSTRAP_KEY = "bootstrap"
"""The id of that key. It has no form of its own, so that an operator may choose it."""


class Level(StrEnum):
    """What a grant allows; each level holds the ones before it."""

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
    # The first and the last year are left to the clocks of other time zones, ours and a database's.
    if not datetime.min.year < moment.year < datetime.max.year:
        raise ValueError("must be between the years 2 and 9998")
    return moment.astimezone(UTC)


AnyMoment = Annotated[AwareDatetime, AfterValidator(_in_utc)]
"""A moment that every clock can show, in UTC."""


KINDS: dict[Any, frozenset[type]] = {
    bool: frozenset({bool}),
    int: frozenset({int, float}),
    float: frozenset({int, float}),
    str: frozenset({str}),
    AwareDatetime: frozenset({str}),
}
"""By type of a field: what JSON may have there. A number like 1.0 is an integer to JSON."""

NAMES = {bool: "a boolean", int: "a number", float: "a number", str: "a string"}


class Strict(BaseModel):
    """A request body: fields it does not know are errors, and so are values of another kind.

    Pydantic takes "yes" for true, true for 1, and a number for a moment; the OpenAPI document does not.
    """

    model_config = ConfigDict(extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def of_its_own_kind(cls, value: Any, info: ValidationInfo) -> Any:
        allowed = _kinds_of(cls, str(info.field_name))
        if type(value) in NAMES and allowed and type(value) not in allowed:
            raise ValueError(f"must be {' or '.join(sorted({NAMES[kind] for kind in allowed}))}")
        return value


@cache
def _kinds_of(model: type[BaseModel], name: str) -> frozenset[type]:
    """What a field may be, of JSON's booleans, numbers and strings; nothing: that is not for us to say."""
    field = model.model_fields[name]
    reads_itself = any(isinstance(one, BeforeValidator) for one in field.metadata)
    return frozenset() if reads_itself else _kinds(field.annotation)


def _kinds(annotation: Any) -> frozenset[type]:
    if get_origin(annotation) is Literal:
        return frozenset(type(value) for value in get_args(annotation))
    if get_origin(annotation) is Annotated:
        kind, *more = get_args(annotation)
        return frozenset() if any(isinstance(one, BeforeValidator) for one in more) else _kinds(kind)
    if get_origin(annotation) in (Union, UnionType):
        return frozenset().union(*(_kinds(inner) for inner in get_args(annotation)))
    if isinstance(annotation, type) and issubclass(annotation, str):
        return KINDS[str]
    return KINDS.get(annotation, frozenset())


class NewTenant(Strict):
    name: TenantName
    title: Label = ""


class TenantChange(Strict):
    title: Label | None = None
    disabled: bool | None = None


class Tenant(BaseModel):
    """An application with keys and grants of its own."""

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
    """A new key with its secret, which is shown this once."""

    key: str


class NewGrant(Strict):
    dataset: DatasetPattern
    level: Level


class Grant(BaseModel):
    """What a tenant may do on the datasets a pattern matches."""

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
    """The limits in force for a tenant, and how much of its quotas is used. A quota of null is none."""

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
    """One write, denial or administrative act."""

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
    """Who is calling: a tenant, by which key, with which grants, and how fast it may."""

    tenant: TenantName
    key: str
    grants: tuple[tuple[DatasetPattern, Level], ...]
    rate_limit: float
    rate_burst: int

    def level_on(self, dataset: str) -> Level | None:
        """The highest level granted on a dataset, or None: then it does not exist for this caller."""
        order = list(Level)
        held = [level for pattern, level in self.grants if pattern.matches(dataset)]
        return max(held, key=order.index, default=None)

    @property
    def administers_lake(self) -> bool:
        return any(pattern == "*" and level is Level.ADMIN for pattern, level in self.grants)
