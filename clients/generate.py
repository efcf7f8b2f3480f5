"""Generate clients from the OpenAPI document that is checked in.

python -m clients.generate python FOLDER      the package `tarn_generated`, by openapi-python-client
python -m clients.generate typescript FOLDER  a package for Node and browsers, by openapi-typescript and openapi-fetch
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from clients.document import DOCUMENT, HERE

PACKAGE = "tarn_generated"
TYPESCRIPT = HERE / "typescript"
TOOLS = HERE.parent / ".tools" / "typescript"
"""Where `make tools` installs the generator of the TypeScript client, if npm is available."""

STRUCTURED = frozenset({"application/json", "multipart/form-data"})
"""Media types of request bodies that openapi-python-client supports."""

RENAMED = {"Mapping": "StoredMapping", "And": "AllOf", "Or": "AnyOf"}
"""Schemata whose names collide with names in openapi-python-client's code, or with one of their properties."""


class CannotGenerate(Exception):
    """A generator is not installed, or fails on the document."""


def python(folder: Path) -> Path:
    """Generate the Python package below this folder. Raises CannotGenerate."""
    document = json.loads(DOCUMENT.read_text())
    config = {
        "package_name_override": PACKAGE,
        "post_hooks": [],
        # Bodies of types that the generator does not support are sent as bytes.
        "content_type_overrides": dict.fromkeys(_streams(document), "application/octet-stream"),
        "class_overrides": {name: {"class_name": new, "module_name": _module(new)} for name, new in RENAMED.items()},
    }
    package = folder / PACKAGE
    with tempfile.NamedTemporaryFile("w", suffix=".yml") as file:
        json.dump(config, file)
        file.flush()
        generator = Path(sys.executable).parent / "openapi-python-client"
        command: list[str | Path] = [generator, "generate", "--path", DOCUMENT, "--fail-on-warning"]
        options: list[str | Path] = ["--config", file.name, "--meta", "none", "--output-path", package, "--overwrite"]
        _run([*command, *options], folder)
    return package


def typescript(folder: Path) -> Path:
    """Generate the TypeScript package in this folder: types, the wrapper `index.ts` and the package files.

    Raises CannotGenerate.
    """
    generator = TOOLS / "node_modules" / ".bin" / "openapi-typescript"
    if not generator.exists():
        raise CannotGenerate(f"openapi-typescript is not in {TOOLS}: install npm, then run `make tools`")
    for name in ("index.ts", "package.json", "package-lock.json", "tsconfig.json"):
        shutil.copy(TYPESCRIPT / name, folder)
    # Properties with a default may be left out of requests.
    _run([generator, DOCUMENT, "--default-non-nullable=false", "--output", folder / "schema.ts"], folder)
    return folder


GENERATORS: dict[str, Callable[[Path], Path]] = {"python": python, "typescript": typescript}


def _streams(document: dict[str, Any]) -> Iterator[str]:
    for operation in (operation for path in document["paths"].values() for operation in path.values()):
        yield from (kind for kind in operation.get("requestBody", {}).get("content", ()) if kind not in STRUCTURED)


def _module(name: str) -> str:
    return re.sub(r"(?<!^)([A-Z])", r"_\1", name).lower()


def _run(command: Sequence[str | Path], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)  # noqa: S603 - our own
    if done.returncode != 0:
        raise CannotGenerate(done.stdout + done.stderr)


def main() -> None:
    """Generate the client that the command line names."""
    try:
        language, folder = sys.argv[1:]
        generate = GENERATORS[language]
    except (ValueError, KeyError):
        sys.exit(__doc__)
    place = Path(folder).resolve()
    place.mkdir(parents=True, exist_ok=True)
    try:
        sys.stdout.write(f"{generate(place)}\n")
    except CannotGenerate as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
