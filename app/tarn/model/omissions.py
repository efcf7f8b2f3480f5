"""Values that were left out of records that were otherwise stored: counted, and the first ones listed."""

from pydantic import BaseModel, Field

MOST_LISTED = 100
"""Values listed one by one; all of them are counted."""

MOST_PROPERTIES = 500
"""Properties counted by name; those beyond are counted together, as `OTHER`: names may come from the sender."""

OTHER = "*"
LONGEST_SHOWN = 200
"""Characters of a value or of a name that are shown."""


class OmittedValue(BaseModel):
    """One value that was left out: where it was, and why."""

    line: int | None = Field(default=None, description="The line, element or row of the body or file, from 1.")
    property: str = Field(
        description="The property, as `Schema:name`; a property that does not exist is named as it was sent."
    )
    value: str = Field(description="The value as it was sent, cut to 200 characters.")
    reason: str


class Omissions(BaseModel):
    """Values that were left out of records that were otherwise stored."""

    count: int = Field(default=0, description="All values that were left out.")
    by_property: dict[str, int] = Field(
        default_factory=dict,
        description="How many of each property; beyond 500 properties the rest is counted as `*`.",
    )
    first: list[OmittedValue] = Field(default_factory=list, description="The first hundred of them.")

    def add(self, schema: str, prop: str, value: str, reason: str, line: int | None = None) -> None:
        """Count one value, and list it if it is among the first."""
        name = f"{schema}:{prop}"[:LONGEST_SHOWN]
        self._count(name, 1)
        if len(self.first) < MOST_LISTED:
            shown = value if len(value) <= LONGEST_SHOWN else value[:LONGEST_SHOWN] + "…"
            self.first.append(OmittedValue(line=line, property=name, value=shown, reason=reason))

    def merge(self, other: "Omissions", line_offset: int = 0) -> None:
        """Add what was left out of a later part of the same input, whose lines begin after `line_offset`."""
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
