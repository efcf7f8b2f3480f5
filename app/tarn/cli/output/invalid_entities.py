"""Entities that a command leaves out because their statements do not assemble: the first are named, all are counted."""

from typing import Any

import typer

from tarn.cli.output.tables import printable

MOST_NAMED = 10
"""Entities that are named one by one on standard error, before the summary."""


class OmittedEntities:
    """Counts what one command leaves out. Standard error gets a line for each of the first, and one summary."""

    def __init__(self, dataset: str) -> None:
        self._dataset = dataset
        self.count = 0

    def add(self, entity: dict[str, Any]) -> None:
        """Count an entity; name it if it is one of the first."""
        self.count += 1
        if self.count <= MOST_NAMED:
            _print(f"the entity {entity['id']} is left out: {entity['reason']}")

    def summarise(self, of: str | None = None) -> None:
        """Print the summary, if anything was left out; `of` names a file."""
        if self.count:
            self._summarise("left out" if of is None else f"left out of {of}")

    def summarise_shown(self) -> None:
        """Print the summary for a command that prints such entities by their id, without what they hold."""
        if self.count:
            self._summarise("printed without content")

    def _summarise(self, what: str) -> None:
        entities, whose = ("1 entity is", "its") if self.count == 1 else (f"{self.count} entities are", "their")
        lists = f"`tarn entities invalid {self._dataset}` lists them"
        _print(f"{entities} {what} because {whose} statements do not assemble: {lists}")


def _print(sentence: str) -> None:
    typer.echo(printable(f"tarn: {sentence}"), err=True)
