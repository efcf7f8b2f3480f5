"""Report of entities that a command omits because their statements do not assemble: first ones by id, and a count."""

from typing import Any

import typer

from tarn.cli.output.tables import printable

MOST_NAMED = 10
"""Number of entities listed on standard error before the summary."""


class OmittedEntities:
    """Counter of entities that one command omits. Prints a line for each of the first, and a summary, to stderr."""

    def __init__(self, dataset: str) -> None:
        self._dataset = dataset
        self.count = 0

    def add(self, entity: dict[str, Any]) -> None:
        """Count an entity; print it if it is one of the first."""
        self.count += 1
        if self.count <= MOST_NAMED:
            _print(f"the entity {entity['id']} is left out: {entity['reason']}")

    def end(self, summary: dict[str, Any]) -> None:
        """Take the count from the last line of a stream, if it has one: a diff prints such entities as null."""
        self.count = summary.get("invalid", self.count)

    def summarise(self, of: str | None = None) -> None:
        """Print the summary, if anything was left out; `of` names a file."""
        if self.count:
            self._summarise("left out" if of is None else f"left out of {of}")

    def summarise_shown(self) -> None:
        """Print the summary for a command that prints such entities by id, without content."""
        if self.count:
            self._summarise("printed without content")

    def _summarise(self, consequence: str) -> None:
        entities, whose = ("1 entity is", "its") if self.count == 1 else (f"{self.count} entities are", "their")
        lists = f"`tarn entities invalid {self._dataset}` lists them"
        _print(f"{entities} {consequence} because {whose} statements do not assemble: {lists}")


def _print(sentence: str) -> None:
    typer.echo(printable(f"tarn: {sentence}"), err=True)
