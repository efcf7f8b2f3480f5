"""A Python prompt: runs the blocks that lines of JSON on its standard input name, in one namespace.

A line has `file` (the block), `location` (for tracebacks) and `environment`. The output of a block is written to
`file`.out, and the response on standard output is `done` or `failed`.
"""

import json
import os
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any


def main() -> None:
    """Run blocks until standard input ends."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for line in sys.stdin:
        request = json.loads(line)
        os.environ.update(request["environment"])
        with Path(f"{request['file']}.out").open("w") as output, redirect_stdout(output), redirect_stderr(output):
            result = _run(Path(request["file"]).read_text(), request["location"], names)
        sys.stdout.write(f"{result}\n")
        sys.stdout.flush()


def _run(text: str, location: str, names: dict[str, Any]) -> str:
    try:
        exec(compile(text, location, "exec"), names)
    except Exception:  # noqa: BLE001 - any exception fails the page
        traceback.print_exc()
        return "failed"
    return "done"


if __name__ == "__main__":
    main()
