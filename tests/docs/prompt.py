"""A Python prompt that is told by lines of JSON what to run, and keeps its names from one block to the next.

A line has `file` (the block), `place` (for tracebacks) and `environment`. What the block prints is put beside it, and
the answer is `done` or `failed`.
"""

import json
import os
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any


def main() -> None:
    """Run what comes in until there is no more."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for line in sys.stdin:
        asked = json.loads(line)
        os.environ.update(asked["environment"])
        with Path(f"{asked['file']}.out").open("w") as output, redirect_stdout(output), redirect_stderr(output):
            answer = _run(Path(asked["file"]).read_text(), asked["place"], names)
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


def _run(text: str, place: str, names: dict[str, Any]) -> str:
    try:
        exec(compile(text, place, "exec"), names)
    except Exception:  # noqa: BLE001 - whatever it is, the page is told of it
        traceback.print_exc()
        return "failed"
    return "done"


if __name__ == "__main__":
    main()
