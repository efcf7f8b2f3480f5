"""What a shell offers behind the tab key, beyond the commands and options that typer knows."""

import os

from tarn.cli.failures import Failure

MOST = 100


def dataset_names(incomplete: str) -> list[str]:
    """The datasets that begin so, on the server and with the key of the environment; none where nothing answers."""
    from tarn.cli.connection import Client
    from tarn.cli.session import DEFAULT_URL

    try:
        with Client(os.environ.get("TARN_URL") or DEFAULT_URL, os.environ.get("TARN_KEY")) as client:
            names = (found["name"] for found in client.each("/v1/datasets"))
            return [name for name in names if name.startswith(incomplete)][:MOST]
    except Failure:
        return []
