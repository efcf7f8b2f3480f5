"""What a text on the command line or in a file stands for: JSON, or YAML as Tarn reads it everywhere."""

import json
from typing import Any

from tarn.model import document


def parse(text: str) -> Any:
    """The value that a text stands for. Raises ValueError, in one line, for what is neither JSON nor YAML."""
    try:
        return json.loads(text, parse_constant=_refused)
    except (ValueError, RecursionError):
        pass  # it may still be YAML; only almost all JSON is
    return document.load(text)


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
