"""Directory layouts of the ftm-lakehouse versions.

| versions  | statements            | what was deleted                        | archive                               |
|-----------|-----------------------|-----------------------------------------|---------------------------------------|
| 0.1.0     | `entities/statements` | nothing can be                          | SHA-1: `{hash}` · `.json` · `.txt`    |
| 0.1.2-0.2 | `entities/statements` | nothing can be                          | SHA-1: `{hash}/blob` · `{id}.json`    |
| 0.3       | `entities/statements` | `deleted_at` in `entities/translog`     | SHA-256: `{hash}/blob` · `{id}.json`  |
| 0.4       | `entities/statements` | rows with a `deleted_at` of their own   | the same                              |
| 0.5-0.7   | `statements`          | rows with a `deleted_at` of their own   | the same                              |

The layout is recognised by the files in a directory: no version of ftm-lakehouse records which one it is.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tarn.cli.failures import Misuse

CONFIG = "config.yml"
TABLES = ("statements", os.path.join("entities", "statements"))
"""Folders of the table of statements; if both exist, the first is read."""
TRANSLOG = os.path.join("entities", "translog")
ARCHIVE, MAPPINGS, QUEUE = "archive", "mappings", "queue"
LOG = "_delta_log"


@dataclass(frozen=True)
class DatasetDirectory:
    """A dataset's directory."""

    folder: str

    @property
    def statements(self) -> str | None:
        """The folder of the table of statements, if there is one."""
        return next((path for table in TABLES if os.path.isdir(os.path.join(path := self.at(table), LOG))), None)

    @property
    def translog(self) -> str | None:
        """The folder of the table of deletions, if there is one."""
        path = self.at(TRANSLOG)
        return path if self.statements == self.at(TABLES[1]) and os.path.isdir(os.path.join(path, LOG)) else None

    @property
    def archive(self) -> str:
        return self.at(ARCHIVE)

    @property
    def mappings(self) -> str:
        return self.at(MAPPINGS)

    def at(self, *names: str) -> str:
        return os.path.join(self.folder, *names)

    def config(self) -> dict[str, Any]:
        """Return its configuration; empty if it has none. Raises Misuse if it cannot be read."""
        from tarn.cli.input.yaml_reader import parse  # late import: only imports need YAML

        path = self.at(CONFIG)
        try:
            with open(path, encoding="utf-8") as file:
                config = parse(file.read())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise Misuse(f"{path} cannot be read: {error}") from None
        if not isinstance(config, dict):
            raise Misuse(f"{path} must contain an object of fields and values")
        return config

    def name(self) -> str:
        """Return its name: from its configuration, or that of its folder."""
        config = self.config().get("name")
        return config if isinstance(config, str) and config else os.path.basename(self.folder)


def find_datasets(path: str) -> list[DatasetDirectory]:
    """Return the datasets of a directory: itself if it is one, else those in it. Raises Misuse if there are none."""
    folder = os.path.abspath(path)
    if not os.path.isdir(folder):
        raise Misuse(f"there is no directory {path}")
    if os.path.exists(os.path.join(folder, "lake.json")):
        raise Misuse(f"{path} is a lake of Tarn: serve it with TARN_LAKE_URI instead of importing it")
    if _holds_data(folder):
        return [_checked(DatasetDirectory(folder))]
    datasets = [DatasetDirectory(below) for below in _folders(folder) if _holds_data(below) or _is_described(below)]
    if datasets:
        return [_checked(directory) for directory in datasets]
    if _is_described(folder):
        return [DatasetDirectory(folder)]
    raise Misuse(
        f"{path} is not a directory of ftm-lakehouse: "
        f"neither it nor a folder in it has statements, an archive or a name in its {CONFIG}"
    )


def _holds_data(folder: str) -> bool:
    directory = DatasetDirectory(folder)
    folders = (directory.archive, directory.mappings)
    return directory.statements is not None or any(os.path.isdir(path) for path in folders)


def _is_described(folder: str) -> bool:
    """Return whether its configuration has a name: that of a lake has none."""
    return isinstance(DatasetDirectory(folder).config().get("name"), str)


def _checked(directory: DatasetDirectory) -> DatasetDirectory:
    """Return the directory. Raises Misuse for a dataset of Tarn, whose tables have other columns."""
    if os.path.isdir(directory.at("snapshots")):
        raise Misuse(f"{directory.folder} is a dataset of Tarn: only data of other tools can be imported")
    return directory


def _folders(folder: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    for name in names:
        yield os.path.join(folder, name)
