"""Mappings: rules of followthemoney that convert rows of a source file to entities.

A mapping has FtM's format and is validated by FtM's rules when it is sent. Rules that FtM would accept but that have no
effect, or fail for every row, are refused as well. FtM's data source (`csv_url`) is ignored: the source is the archived
file.
"""

from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Any, Self

import orjson
from banal import as_bool, ensure_list
from followthemoney.exc import FollowTheMoneyException
from followthemoney.mapping.query import QueryMapping
from followthemoney.model import Model
from followthemoney.property import Property
from followthemoney.schema import Schema
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from tarn.errors import FieldError, InvalidFormat, SchemaViolation
from tarn.model import document
from tarn.model.document import STORED, InvalidYaml
from tarn.model.names import Checksum, DatasetName, Origin
from tarn.model.tenant import Strict

YAML_TYPES = ("application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml")
TYPES = ("application/json", *YAML_TYPES)

NOWHERE = "/dev/null"
"""Placeholder for the data source that FtM requires; it is never read."""

MOST_FORMATS = 200
"""Maximum number of different value formats in a mapping."""

ELSEWHERE = ("csv_url", "csv_urls")
"""FtM's fields for the data source, which are ignored."""


def tag_of(content_hash: Checksum) -> str:
    """Return the key of the tag that records when a mapping was last processed."""
    return f"mappings/{content_hash}/last_processed"


def origin_of(content_hash: Checksum) -> Origin:
    """Return the origin of a mapping's statements."""
    return Origin(f"mapping:{content_hash}")


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("must be text that can be written as UTF-8") from None
    return document.plain(value)


def _truth(value: Any) -> Any:
    return as_bool(value) if isinstance(value, str | int) or value is None else value


def _number_as_text(value: Any) -> Any:
    return str(value) if type(value) is int else value


Text = Annotated[str, Field(max_length=10_000), AfterValidator(_text)]
Named = Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(_text)]
Columns = Annotated[list[Named], Field(default_factory=list, max_length=1000)]
Truth = Annotated[bool, BeforeValidator(_truth)]
Allowed = Annotated[list[Text | None], Field(max_length=10_000), BeforeValidator(ensure_list)]
Filters = Annotated[dict[Named, Allowed], Field(default_factory=dict, max_length=100)]


def _joined(data: Any, one: str, several: str) -> Any:
    """Merge the singular and plural field, each one value or a list, into the plural. FtM accepts both."""
    if not isinstance(data, dict) or one not in data:
        return data
    rest = {name: value for name, value in data.items() if name not in (one, several)}
    return rest | {several: [*ensure_list(data[one]), *ensure_list(data.get(several))]}


class PropertyRule(Strict):
    """The rule for the values of a property."""

    columns: Columns
    literals: Annotated[list[Text], Field(default_factory=list, max_length=1000)]
    template: Annotated[str, Field(min_length=1, max_length=10_000), AfterValidator(_text)] | None = None
    entity: Named | None = Field(None, description="Another entity of the same query to reference.")
    join: Text | None = None
    split: Named | None = None
    format: Named | None = None
    fuzzy: Truth = False
    required: Truth = False

    @model_validator(mode="before")
    @classmethod
    def lists(cls, data: Any) -> Any:
        return _joined(_joined(data, "column", "columns"), "literal", "literals")

    @model_validator(mode="after")
    def has_a_source(self) -> Self:
        if not self.columns and not self.literals and self.template is None and self.entity is None:
            raise ValueError("needs a column, a literal, a template or an entity")
        return self


class EntityRule(Strict):
    """The rule for one entity per row."""

    model_config = ConfigDict(populate_by_name=True)

    schema_: Named = Field(alias="schema")
    keys: Columns
    key_literal: Annotated[Text, BeforeValidator(_number_as_text)] | None = None
    id_column: Named | None = None
    properties: Annotated[dict[Named, PropertyRule], Field(default_factory=dict)]

    @model_validator(mode="before")
    @classmethod
    def lists(cls, data: Any) -> Any:
        return _joined(data, "key", "keys")

    @model_validator(mode="after")
    def has_keys_or_id_column(self) -> Self:
        if bool(self.keys) == (self.id_column is not None):
            raise ValueError("needs `keys` or an `id_column`, and not both")
        return self


class Query(Strict):
    """Entities created from the same rows, and filters that select the rows."""

    entities: Annotated[dict[Named, EntityRule], Field(min_length=1, max_length=100)]
    filters: Filters
    filters_not: Filters

    @model_validator(mode="before")
    @classmethod
    def without_database_source(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name in ("database", "table", "tables", "joins"):
            if name in data:
                raise ValueError(f"`{name}` is for databases: the source of a mapping is the archived file")
        return {name: value for name, value in data.items() if name not in ELSEWHERE}


class MappingDocument(Strict):
    """`mapping.yml`: the queries of a mapping."""

    queries: Annotated[list[Query], Field(min_length=1, max_length=100)]

    def to_yaml(self, dataset: DatasetName) -> bytes:
        """Return the document in the format of FtM's tools."""
        return document.dump({str(dataset): self.model_dump(mode="json", by_alias=True, exclude_defaults=True)})

    @classmethod
    def from_yaml(cls, text: bytes) -> Self:
        return cls.model_validate({"queries": _queries_of(document.load(text, STORED))})

    def ftm(self, dataset: DatasetName) -> list[QueryMapping]:
        """Return FtM's query mappings. Raises InvalidMapping."""
        return [_ftm(query, dataset) for query in self.queries]


class Mapping(BaseModel):
    """A stored mapping, and when it was last processed."""

    content_hash: Checksum = Field(description="The SHA-256 of the source file in the archive.")
    origin: Origin = Field(description="Origin of its statements.")
    processed: datetime | None = Field(description="When it was last processed; null: never.")
    fresh: bool = Field(description="Whether the current mapping was processed.")
    queries: list[Query]


class ListedMapping(BaseModel):
    """A mapping without its queries."""

    content_hash: Checksum
    origin: Origin
    processed: datetime | None = Field(description="When it was last processed; null: never.")


def parsed(text: bytes, media_type: str) -> MappingDocument:
    """Parse a mapping. Raises InvalidFormat if the body is not JSON or YAML, and SchemaViolation, with the field of
    each error, if it is not a valid mapping."""
    data = _loaded(text, media_type)
    try:
        mapping = MappingDocument.model_validate({"queries": _queries_of(data)})
    except ValidationError as error:
        raise _invalid(_shown(error)) from None
    formats = _Formats()
    faults = [
        fault for number, query in enumerate(mapping.queries) for fault in _faults(f"queries.{number}", query, formats)
    ]
    if faults:
        raise _invalid(faults)
    return mapping


# Parsing


def _loaded(text: bytes, media_type: str) -> Any:
    try:
        if media_type in YAML_TYPES:
            return document.load(text)
        data = orjson.loads(text)
        document.check_size(data)
        return data
    except orjson.JSONDecodeError as error:
        fault = FieldError(line=error.lineno, reason=f"{error.msg} at column {error.colno}")
    except InvalidYaml as error:
        fault = FieldError(line=error.line, reason=error.reason)
    raise InvalidFormat(f"the mapping cannot be read: {fault.reason}", errors=[fault])


def _queries_of(data: Any) -> Any:
    """Return the queries from any of FtM's formats: one query, a list, or a file with the dataset's name as its key."""
    if isinstance(data, dict) and "entities" not in data:
        if len(data) == 1 and not data.keys() & {"query", "queries"}:
            (data,) = data.values()
        if isinstance(data, dict) and data.keys() <= {"query", "queries"}:
            return [*ensure_list(data.get("query")), *ensure_list(data.get("queries"))]
    return ensure_list(data)


# Validation


def _ftm(query: Query, dataset: str) -> QueryMapping:
    data = query.model_dump(by_alias=True, exclude_defaults=True) | {"csv_url": NOWHERE}
    return QueryMapping(Model.instance(), data, key_prefix=dataset, dataset=dataset)


class _Formats:
    """Validates the value formats of a mapping, each only once: some are slow."""

    def __init__(self) -> None:
        self._problems: dict[tuple[str, bool, str], str | None] = {}

    def problem(self, prop: Property, fuzzy: bool, form: str) -> str | None:
        """Return FtM's error for a format, which would occur at every row; None if it is valid."""
        key = prop.type.name, fuzzy, form
        if key not in self._problems:
            if len(self._problems) >= MOST_FORMATS:
                return f"exceeds the maximum of {MOST_FORMATS} different formats"
            try:
                prop.type.clean_text("1", fuzzy=fuzzy, format=form)
            except Exception as error:  # noqa: BLE001 - the same error would occur at every row
                self._problems[key] = str(error) or type(error).__name__
            else:
                self._problems[key] = None
        return self._problems[key]


def _faults(where: str, query: Query, formats: _Formats) -> Iterator[FieldError]:
    """Yield what FtM would refuse, each with its field; if there is nothing, the error of FtM's own validation."""
    faults = [
        fault for name in query.entities for fault in _entity_faults(f"{where}.entities.{name}", query, name, formats)
    ]
    yield from faults
    if not faults:
        try:
            _ftm(query, "dataset")
        except FollowTheMoneyException as error:
            yield FieldError(field=f"{where}.entities", reason=str(error))


def _entity_faults(where: str, query: Query, name: str, formats: _Formats) -> Iterator[FieldError]:
    rule = query.entities[name]
    schema = Model.instance().get(rule.schema_)
    if schema is None:
        yield FieldError(field=f"{where}.schema", reason=f"{rule.schema_!r} is not a schema of FollowTheMoney")
        return
    for prop_name, prop_rule in rule.properties.items():
        field = f"{where}.properties.{prop_name}"
        prop = schema.get(prop_name)
        if prop is None:
            yield FieldError(field=field, reason=f"{prop_name!r} is not a property of {schema.name}")
        elif prop.stub:
            yield FieldError(field=field, reason="is the other side of a reference and cannot be set")
        else:
            yield from _value_faults(field, query, prop, prop_rule, formats)


def _value_faults(
    field: str, query: Query, prop: Property, rule: PropertyRule, formats: _Formats
) -> Iterator[FieldError]:
    if rule.entity is not None:
        other = query.entities.get(rule.entity)
        if other is None:
            yield FieldError(field=f"{field}.entity", reason=f"there is no entity {rule.entity!r} in this query")
            return
        schema = Model.instance().get(other.schema_)
        if schema is not None and not _fits(prop, schema):
            reason = f"{rule.entity!r} is a {schema.name}, and must be a {prop.range.name if prop.range else 'nothing'}"
            yield FieldError(field=f"{field}.entity", reason=reason)
    if rule.format is not None:
        problem = formats.problem(prop, rule.fuzzy, rule.format)
        if problem is not None:
            yield FieldError(field=f"{field}.format", reason=problem)


def _fits(prop: Property, schema: Schema) -> bool:
    return prop.range is not None and schema.is_a(prop.range)


def _shown(error: ValidationError) -> list[FieldError]:
    return [
        FieldError(field=".".join(map(str, fault["loc"])) or None, reason=fault["msg"].removeprefix("Value error, "))
        for fault in error.errors(include_url=False, include_input=False)[:100]
    ]


def _invalid(faults: list[FieldError]) -> SchemaViolation:
    first = faults[0]
    where = f"{first.field}: " if first.field else ""
    return SchemaViolation(f"the mapping is not valid: {where}{first.reason}", errors=faults[:100])
