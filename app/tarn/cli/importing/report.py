"""Import report: counts of source and target, warnings and errors."""

from dataclasses import dataclass, field
from typing import Any

from tarn.cli.importing.tables import ImportCounts


@dataclass
class ImportReport:
    """The report of one dataset's import."""

    folder: str
    dataset: str
    state: str
    layout: str = ""
    version: list[int] = field(default_factory=list)
    size: int = 0
    texts: int = 0
    rejected: int = 0
    errors: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    _source: dict[str, int] = field(default_factory=dict)
    _target: dict[str, int] | None = None

    def source(self, counts: ImportCounts, files: int, mappings: int) -> None:
        """Set the counts of the source."""
        self._source = _lines(counts, files, mappings)

    def target(self, counts: ImportCounts, files: int, mappings: int) -> None:
        """Set the counts of the target after the import."""
        self._target = _lines(counts, files, mappings)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each count, of the source and of the target."""
        names = [*self._source, *(name for name in self._target or {} if name not in self._source)]
        return [
            {"what": name, "source": self._source.get(name, 0)}
            | ({} if self._target is None else {"target": self._target.get(name, 0)})
            for name in names
        ]

    def differing(self, only_missing: bool) -> list[str]:
        """Return a sentence for each count that differs; with `only_missing`, only if the target has less."""
        if self._target is None:
            return []
        return [
            f"{row['what']}: {row['source']} in the source, {row['target']} in {self.dataset}"
            for row in self.rows()
            if (row["target"] < row["source"] if only_missing else row["target"] != row["source"])
        ]

    def document(self) -> dict[str, Any]:
        return {
            "source": self.folder,
            "dataset": self.dataset,
            "state": self.state,
            "layout": self.layout,
            "version": self.version,
            "counts": self.rows(),
            "bytes": self.size,
            "texts": self.texts,
            "rejected": self.rejected,
            "errors": self.errors[:100],
            "warnings": self.warnings,
        }


def _lines(counts: ImportCounts, files: int, mappings: int) -> dict[str, int]:
    lines = {"statements": counts.statements, "entities": counts.entities, "files": files, "mappings": mappings}
    for origin, (statements, entities) in sorted(counts.origins.items()):
        lines |= {f"statements of {origin}": statements, f"entities of {origin}": entities}
    return lines
