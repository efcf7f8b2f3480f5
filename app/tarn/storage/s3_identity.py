"""S3 credentials: configured keys, or else the ambient AWS identity of this process."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import botocore.session
from botocore.exceptions import BotoCoreError, ClientError

from tarn.errors import StartRefused, Unavailable

if TYPE_CHECKING:
    from botocore.credentials import Credentials
    from obstore.store import S3Credential

VALID_FOR = timedelta(minutes=10)
"""botocore returns no temporary keys that expire sooner than this."""


@dataclass(frozen=True)
class Keys:
    """The current credentials."""

    access_key_id: str = field(repr=False)
    secret_access_key: str = field(repr=False)
    token: str | None = field(repr=False)


class AwsIdentity:
    """The source of keys for every library. It is callable as obstore's credential provider."""

    def __init__(self, options: Mapping[str, str]) -> None:
        """Raise StartRefused if no keys are configured and there is no ambient identity.

        It comes from botocore's chain: environment, profile, web identity, container, instance metadata.
        """
        self._static: Keys | None = None
        self._ambient: Credentials | None = None
        self._last: Keys | None = None
        if "access_key_id" in options:
            self._static = Keys(options["access_key_id"], options["secret_access_key"], options.get("session_token"))
            return
        try:
            self._ambient = botocore.session.get_session().get_credentials()
        except BotoCoreError:
            raise StartRefused(
                "the ambient AWS identity cannot be read: its profile or environment is broken"
            ) from None
        if self._ambient is None:
            raise StartRefused(
                "there are no credentials for the lake's bucket: set aws_access_key_id and aws_secret_access_key in "
                "TARN_STORAGE_OPTIONS, or give the process an AWS identity"
            )

    def keys(self) -> Keys:
        """Return the current keys, renewed when they are about to expire. Raises Unavailable."""
        if self._static:
            return self._static
        assert self._ambient is not None
        try:
            frozen = self._ambient.get_frozen_credentials()
        except (BotoCoreError, ClientError) as error:
            raise Unavailable(
                "the object store's keys cannot be fetched: the identity service does not answer"
            ) from error
        self._last = Keys(frozen.access_key, frozen.secret_key, frozen.token)
        return self._last

    def secrets_in_use(self) -> list[str]:
        """Return the secrets last passed to libraries, to be redacted from their errors."""
        last = self._static or self._last
        return [secret for secret in (last.secret_access_key, last.token) if secret] if last else []

    def __call__(self) -> "S3Credential":
        keys = self.keys()
        return {
            "access_key_id": keys.access_key_id,
            "secret_access_key": keys.secret_access_key,
            "token": keys.token,
            "expires_at": None if self._static else datetime.now(UTC) + VALID_FOR,
        }
