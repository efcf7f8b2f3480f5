"""Write the OpenAPI document to a file, and record what a release promises.

python -m clients.document            write `openapi.json` from the code
python -m clients.document --release  also record its promises in `released.txt`, which later versions must keep
"""

import json
import sys
from pathlib import Path

from clients.surface import Surface, surface

HERE = Path(__file__).parent
DOCUMENT, RELEASED, DECLARED = HERE / "openapi.json", HERE / "released.txt", HERE / "breaking.txt"

ABOUT_DECLARED = """\
# Breaking changes since the last release: removed promises and new requirements. Each line is as the failing test
# prints it, below a comment with the reason. A release empties this file.
"""


def document_text() -> str:
    """Return the OpenAPI document of the code, formatted as it is checked in."""
    from tarn.api.application import openapi_document

    return json.dumps(openapi_document(), indent=1, ensure_ascii=False) + "\n"


def released() -> Surface:
    """Return the promises and requirements of the last release."""
    return Surface.parse(RELEASED.read_text())


def declared() -> set[str]:
    """Return the lines of `breaking.txt`: the declared breaking changes."""
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
