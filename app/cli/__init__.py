"""The command line: processes of the server, and a client of its API."""

from app.cli.commands import main

__all__ = ["main"]
