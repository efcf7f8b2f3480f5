"""Shell completion of dataset names; typer completes commands and options."""

import os

from tarn.cli.connection import DEFAULT_URL, connected
from tarn.cli.failures import FAILURES

MOST = 100


def dataset_names(incomplete: str) -> list[str]:
    """Return dataset names with this prefix, using TARN_URL and TARN_KEY; none if the server is not reachable."""
    try:
        with connected(os.environ.get("TARN_URL") or DEFAULT_URL, os.environ.get("TARN_KEY")) as connection:
            names = (dataset["name"] for dataset in connection.each("/v1/datasets"))
            return [name for name in names if name.startswith(incomplete)][:MOST]
    except FAILURES:
        return []
