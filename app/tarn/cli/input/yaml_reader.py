"""Parser of JSON or YAML given on the command line or in a file."""

import json
from typing import Any

from tarn.model import document


def parse(text: str) -> Any:
    """Return the parsed value. Raises ValueError, with a one-line message, for text that is neither JSON nor YAML."""
    try:
        return json.loads(text, parse_constant=_refused)
    except (ValueError, RecursionError):
        pass  # it may still be YAML; only almost all JSON is
    return document.load(text)


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
