"""The OpenAPI document as a file, and the promises of the last release.

python -m clients.document            write `openapi.json`, as the code has it
python -m clients.document --release  and take what it promises for what later versions are held to
"""

import json
import sys
from pathlib import Path

from clients.surface import Surface, surface

HERE = Path(__file__).parent
DOCUMENT, RELEASED, DECLARED = HERE / "openapi.json", HERE / "released.txt", HERE / "breaking.txt"

ABOUT_DECLARED = """\
# What a change takes away from clients of the last release, or newly demands of them: each line as the failing test
# names it, below a comment that says why. A release empties this file.
"""


def document_text() -> str:
    """The document of the code, as it is checked in."""
    from tarn.api.application import openapi_document

    return json.dumps(openapi_document(), indent=1, ensure_ascii=False) + "\n"


def released() -> Surface:
    """What the last release promised and demanded."""
    return Surface.parse(RELEASED.read_text())


def declared() -> set[str]:
    """The lines that a change has been declared to break."""
    return {line for line in DECLARED.read_text().splitlines() if line and not line.startswith("#")}


def main() -> None:
    """Write the files."""
    text = document_text()
    DOCUMENT.write_text(text)
    if "--release" in sys.argv[1:]:
        RELEASED.write_text(surface(json.loads(text)).text())
        DECLARED.write_text(ABOUT_DECLARED)


if __name__ == "__main__":
    main()
