"""A stage: writes that become visible together, when it is committed."""

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tarn_client.errors import LakeError, Problem
from tarn_client.paths import path_of

if TYPE_CHECKING:
    from tarn_client.connection import Connection, Params

ABORT_SECONDS = 5.0
"""Seconds for which an abort is retried: the stage expires anyway, and the caller waits to report an error."""


class Stage:
    """An open stage of a dataset. It expires if nothing is sent to it for long."""

    def __init__(
        self, connection: "Connection", dataset_path: str, origin: str | None, message: str | None = None
    ) -> None:
        """Open the stage. Raises LakeError."""
        self._connection = connection
        body = {"origin": origin} if message is None else {"origin": origin, "message": message}
        opened = connection.write("POST", f"{dataset_path}/stages", body)
        self.id: str = opened["id"]
        self.path = path_of(f"{dataset_path}/stages", self.id)

    def send(
        self,
        records: str,
        content: bytes,
        headers: Mapping[str, str],
        params: "Params | None" = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Add `entities` or `statements` in one request; return the server's report. Raises LakeError."""
        return self._connection.write(
            "POST", f"{self.path}/{records}", params=params, content=content, headers=headers, timeout=timeout
        )

    def commit(self, params: "Params | None" = None) -> dict[str, Any]:
        """Make everything in the stage visible; return the commit. Raises LakeError."""
        try:
            return self._connection.write("POST", f"{self.path}/commit", params=params)
        except Problem as problem:
            # An earlier attempt may have committed the stage, and failed before its response was stored.
            stage = self._connection.read(self.path) if problem.slug == "stage-closed" else {}
            if stage.get("state") != "committed":
                raise
            return {**stage, "snapshot": None}

    def abort(self) -> None:
        """Abort the stage. If the server does not respond within some seconds, the stage expires later."""
        with suppress(LakeError):
            self._connection.with_retries(ABORT_SECONDS).write("DELETE", self.path)
