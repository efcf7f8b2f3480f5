"""Omitted values of records that were otherwise stored: counts, and a list of the first ones."""

from pydantic import BaseModel, Field

MOST_LISTED = 100
"""Maximum values listed individually; all are counted."""

MOST_PROPERTIES = 500
"""Maximum properties counted by name; further ones are counted as `OTHER`, because senders can invent names."""

OTHER = "*"
LONGEST_SHOWN = 200
"""Maximum characters of a value or name that are shown."""


class OmittedValue(BaseModel):
    """One omitted value: its location and the reason."""

    line: int | None = Field(default=None, description="The line, element or row of the body or file, from 1.")
    property: str = Field(description="The property, as `Schema:name`; an unknown property has the name that was sent.")
    value: str = Field(description="The value as it was sent, truncated to 200 characters.")
    reason: str


class Omissions(BaseModel):
    """Values that were omitted from records that were otherwise stored."""

    count: int = Field(default=0, description="Total number of omitted values.")
    by_property: dict[str, int] = Field(
        default_factory=dict,
        description="Number per property; beyond 500 properties the rest is counted as `*`.",
    )
    first: list[OmittedValue] = Field(default_factory=list, description="The first hundred omitted values.")

    def add(self, schema: str, prop: str, value: str, reason: str, line: int | None = None) -> None:
        """Count one value, and list it if it is among the first."""
        name = f"{schema}:{prop}"[:LONGEST_SHOWN]
        self._count(name, 1)
        if len(self.first) < MOST_LISTED:
            shown = value if len(value) <= LONGEST_SHOWN else value[:LONGEST_SHOWN] + "…"
            self.first.append(OmittedValue(line=line, property=name, value=shown, reason=reason))

    def merge(self, other: "Omissions", line_offset: int = 0) -> None:
        """Add the omissions of a later part of the same input, whose lines begin after `line_offset`."""
        for name, count in other.by_property.items():
            self._count(name, count)
        for value in other.first[: MOST_LISTED - len(self.first)]:
            line = None if value.line is None else value.line + line_offset
            self.first.append(value.model_copy(update={"line": line}))

    def _count(self, name: str, count: int) -> None:
        self.count += count
        if name not in self.by_property and len(self.by_property) >= MOST_PROPERTIES:
            name = OTHER
        self.by_property[name] = self.by_property.get(name, 0) + count
