"""The command line: processes of the server, and a client of its API."""

from tarn.cli.application import main

__all__ = ["main"]
