"""Where things are in a directory that ftm-lakehouse wrote, in the layouts of its versions.

| versions  | statements            | what was deleted                        | archive                               |
|-----------|-----------------------|-----------------------------------------|---------------------------------------|
| 0.1.0     | `entities/statements` | nothing can be                          | SHA-1: `{hash}` · `.json` · `.txt`    |
| 0.1.2-0.2 | `entities/statements` | nothing can be                          | SHA-1: `{hash}/blob` · `{id}.json`    |
| 0.3       | `entities/statements` | `deleted_at` in `entities/translog`     | SHA-256: `{hash}/blob` · `{id}.json`  |
| 0.4       | `entities/statements` | rows with a `deleted_at` of their own   | the same                              |
| 0.5-0.7   | `statements`          | rows with a `deleted_at` of their own   | the same                              |

What a directory holds is told by what lies in it: none of the versions writes down which one it was.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tarn.cli.failures import Misuse

CONFIG = "config.yml"
TABLES = ("statements", os.path.join("entities", "statements"))
"""Where statements are; of both, the first counts."""
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
        """The folder of the table that says what was deleted, if there is one."""
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
        """What its configuration says; nothing if there is none. Raises Misuse if it cannot be read."""
        from tarn.cli.input.yaml_reader import parse  # late: only who imports something needs YAML

        path = self.at(CONFIG)
        try:
            with open(path, encoding="utf-8") as file:
                said = parse(file.read())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise Misuse(f"{path} cannot be read: {error}") from None
        if not isinstance(said, dict):
            raise Misuse(f"{path} must hold fields and their values")
        return said

    def name(self) -> str:
        """What it is called: by its configuration, or else by its folder."""
        said = self.config().get("name")
        return said if isinstance(said, str) and said else os.path.basename(self.folder)


def find_datasets(path: str) -> list[DatasetDirectory]:
    """The datasets at a directory: itself if it is one, else those in it. Raises Misuse if there are none."""
    folder = os.path.abspath(path)
    if not os.path.isdir(folder):
        raise Misuse(f"there is no directory {path}")
    if os.path.exists(os.path.join(folder, "lake.json")):
        raise Misuse(
            f"{path} is a lake of Tarn itself: a server opens it with TARN_LAKE_URI, nothing is to be imported"
        )
    if _holds_data(folder):
        return [_checked(DatasetDirectory(folder))]
    inside = [DatasetDirectory(below) for below in _folders(folder) if _holds_data(below) or _is_described(below)]
    if inside:
        return [_checked(place) for place in inside]
    if _is_described(folder):
        return [DatasetDirectory(folder)]
    raise Misuse(
        f"{path} is no directory of ftm-lakehouse: "
        f"neither it nor a folder in it has statements, an archive or a name in its {CONFIG}"
    )


def _holds_data(folder: str) -> bool:
    place = DatasetDirectory(folder)
    return place.statements is not None or any(os.path.isdir(path) for path in (place.archive, place.mappings))


def _is_described(folder: str) -> bool:
    """Whether it says that it is a dataset: a lake has a configuration as well, and no name."""
    return isinstance(DatasetDirectory(folder).config().get("name"), str)


def _checked(place: DatasetDirectory) -> DatasetDirectory:
    """Raises Misuse for a dataset of a lake of Tarn, whose tables have other columns."""
    if os.path.isdir(place.at("snapshots")):
        raise Misuse(f"{place.folder} is a dataset of Tarn itself: what others wrote is imported")
    return place


def _folders(folder: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    for name in names:
        yield os.path.join(folder, name)
