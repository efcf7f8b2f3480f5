"""Storage connection: the lake's URI, options and credentials, and how obstore, deltalake and DuckDB get them."""

import os
import re
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, unquote, urlsplit

from duckdb import DuckDBPyConnection
from obstore.exceptions import BaseError, UnknownConfigurationKeyError
from obstore.fsspec import FsspecStore
from obstore.store import AzureStore, GCSStore, LocalStore, S3Store

from tarn.errors import StartRefused
from tarn.storage import duckdb_setup
from tarn.storage.disk import Disk
from tarn.storage.s3_identity import AwsIdentity, Keys
from tarn.storage.s3_options import s3_options

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig
    from pydantic import SecretStr

    from tarn.settings import Settings

CONNECT, READ, RETRIES, RETRY_FOR = "10s", "30s", 3, timedelta(seconds=30)
"""Timeouts: a store that does not answer is an error after at most a minute, retries included."""
LONGEST_CALL = 120.0
"""Seconds after which no call can still be in flight: that minute, doubled for safety."""
WHOLE_STREAM = "24h"
"""Total timeout of a stream: obstore's default ends any download after 30 s. `READ` ends those that stall."""
WHOLE_REQUEST = "60s"
"""Total timeout of a deltalake request: it ignores `READ`, and reads files in parts."""
STANDSTILL = 14
"""Seconds without a byte after which DuckDB ends an attempt. DuckDB limits attempts, not their total time."""

SECRET = re.compile("key|secret|token|password")


@dataclass(frozen=True)
class Connection:
    """The lake's root and its options. It can be pickled for use in another process.

    Configured keys are pickled with it. An ambient identity is not: each process obtains and renews its own.
    """

    uri: str
    options: dict[str, str] = field(default_factory=dict, repr=False, hash=False)

    @classmethod
    def from_settings(cls, settings: "Settings") -> "Connection":
        """Return the lake's connection. Raises StartRefused for a URI or an option that cannot be used."""
        return cls.at(settings.lake_uri, _revealed(settings.storage_options), "TARN_LAKE_URI", "TARN_STORAGE_OPTIONS")

    @classmethod
    def to_backups(cls, settings: "Settings", uri: str) -> "Connection":
        """Return a connection to a backup location, with its own options, or the lake's if both have the same scheme.

        Raises StartRefused.
        """
        from tarn.settings import LAKE_SCHEMES

        scheme = urlsplit(uri).scheme
        if scheme not in LAKE_SCHEMES:
            raise StartRefused(f"{uri} must be a local path or start with s3://, gs:// or az://")
        options: dict[str, str] = {}
        if scheme not in ("", "file"):
            same = scheme == urlsplit(settings.lake_uri).scheme
            own = settings.backup_options or (settings.storage_options if same else {})
            options = _revealed(own)
        return cls.at(uri, options, uri, "TARN_BACKUP_OPTIONS")

    @classmethod
    def at(cls, uri: str, options: dict[str, str], named: str, options_named: str) -> "Connection":
        """Return a connection; errors name the settings `named` and `options_named`. Raises StartRefused."""
        url = urlsplit(uri)
        if url.scheme in ("", "file"):
            if options:
                raise StartRefused(f"{options_named} is set, and a lake on a local path takes no options")
            return cls(str(_local_path(uri, url, named)))
        if not url.netloc or "@" in url.netloc or url.query or url.fragment:
            raise StartRefused(f"{named} must look like {url.scheme}://bucket or {url.scheme}://bucket/folder")
        connection = cls(
            f"{url.scheme}://{url.netloc}{url.path}".rstrip("/"), s3_options(options) if url.scheme == "s3" else options
        )
        connection.object_store()
        return connection

    def overlaps(self, other: "Connection") -> bool:
        """Return whether one of two locations contains the other."""
        mine, theirs = f"{self.uri.rstrip('/')}/", f"{other.uri.rstrip('/')}/"
        return mine.startswith(theirs) or theirs.startswith(mine)

    @property
    def scheme(self) -> str:
        return self._url.scheme or "file"

    @property
    def folder(self) -> Path | None:
        """The lake's root on a local disk."""
        return Path(self.uri) if self.scheme == "file" else None

    @cached_property
    def _url(self) -> SplitResult:
        return SplitResult("", "", self.uri, "", "") if self.uri.startswith("/") else urlsplit(self.uri)

    @property
    def _bucket(self) -> str:
        return self._url.netloc

    @property
    def _prefix(self) -> str | None:
        return self._url.path.strip("/") or None

    def __getstate__(self) -> dict[str, Any]:
        return {"uri": self.uri, "options": self.options}

    # Addresses

    def table_uri(self, path: str) -> str:
        """Return the address of a Delta table for deltalake."""
        return f"{self.uri}/{path}"

    def file_url(self, path: str) -> str:
        """Return the address of an object for DuckDB, which can read it after `prepare`."""
        return f"{self.uri}/{path}"

    # Libraries

    def object_store(self) -> "ObjectStore":
        """Return obstore's store, rooted at the lake. Raises StartRefused."""
        if self.folder:
            try:
                Disk(self.folder).make()
                return LocalStore(self.folder)
            except OSError as error:
                raise StartRefused(f"the lake's folder {self.folder} cannot be created: {error.strerror}") from None
        try:
            return self._remote_store()
        except UnknownConfigurationKeyError as error:
            key = str(error).split("'")[1]
            raise StartRefused(f"TARN_STORAGE_OPTIONS: {key} is not an option of an {self.scheme}:// lake") from None
        except (BaseError, ValueError) as error:
            reason = self.redact(str(error).split("\n")[0])
            raise StartRefused(f"the lake's {self.scheme}:// options cannot be used: {reason}") from None

    def _remote_store(self) -> "ObjectStore":
        if self.scheme == "gs":
            return GCSStore(self._bucket, prefix=self._prefix, config=self._config(), **self._limits())
        if self.scheme == "az":
            return AzureStore(self._bucket, prefix=self._prefix, config=self._config(), **self._limits())
        return S3Store(
            self._bucket,
            prefix=self._prefix,
            config=self._s3_config(),
            credential_provider=self._identity,
            **self._limits(),
        )

    def delta_options(self) -> dict[str, str]:
        """Return deltalake's `storage_options`.

        Temporary keys in them are valid for at least ten minutes: call it again for every table.
        """
        if self.folder:
            return {}
        options = {
            "connect_timeout": CONNECT,
            "timeout": WHOLE_REQUEST,
            "max_retries": str(RETRIES),
            "retry_timeout": f"{RETRY_FOR.seconds}s",
        }
        if self._over_http:
            options["allow_http"] = "true"
        if self.scheme != "s3":
            return options | self.options
        keys = self._identity.keys()
        options |= {f"aws_{name.removeprefix('aws_')}": value for name, value in self._s3_config().items()}
        options["aws_access_key_id"] = keys.access_key_id
        options["aws_secret_access_key"] = keys.secret_access_key
        if keys.token or "AWS_SESSION_TOKEN" in os.environ:
            # If omitted, it would be read from the environment, where it may belong to other keys.
            options["aws_session_token"] = keys.token or ""
        return options

    def keys(self) -> Keys | None:
        """Return the current keys that `prepare` passes to DuckDB; None if it passes none. Raises Unavailable."""
        return self._identity.keys() if self.scheme == "s3" else None

    def prepare(self, connection: DuckDBPyConnection) -> None:
        """Configure DuckDB to read `file_url`s with the current keys.

        Call it again before a query when `keys` has changed: temporary keys are valid for at least ten more minutes.
        Call it from one thread at a time: DuckDB rejects concurrent changes of keys. It also works after the
        configuration has been locked.
        """
        duckdb_setup.forbid_downloads(connection)
        if self.scheme == "s3":
            duckdb_setup.load_httpfs(connection)
            duckdb_setup.set_limits(connection, STANDSTILL, RETRIES)
            duckdb_setup.set_keys(
                connection,
                self._bucket,
                self._identity.keys(),
                self.options["region"],
                self.options.get("endpoint"),
                by_host=self._by_host,
            )
        elif not self.folder and self.scheme not in connection.list_filesystems():
            files = FsspecStore(self.scheme, config=self._config(), **self._limits())  # type: ignore[call-overload]  # it wants literals
            connection.register_filesystem(files)

    # Options for the libraries

    @cached_property
    def _identity(self) -> AwsIdentity:
        return AwsIdentity(self.options)

    @property
    def _over_http(self) -> bool:
        addresses = (value for name, value in self.options.items() if name.endswith(("endpoint", "base_url")))
        return any(address.startswith("http://") for address in addresses)

    @property
    def _by_host(self) -> bool:
        return self.options.get("virtual_hosted_style_request", "false").lower() == "true"

    def _config(self) -> Any:
        return dict(self.options)

    def _s3_config(self) -> Any:
        """Return S3's options without the keys. Set those that a library would read from the environment."""
        own = {"access_key_id", "secret_access_key", "session_token", "endpoint"}
        config = {name: value for name, value in self.options.items() if name not in own}
        config["virtual_hosted_style_request"] = str(self._by_host).lower()
        config["skip_signature"] = "false"
        config["conditional_put"] = "etag"
        config.setdefault("copy_if_not_exists", "multipart")
        if endpoint := self.options.get("endpoint"):
            scheme, host = endpoint.split("://", 1)
            if self._by_host and not host.startswith(f"{self._bucket}."):
                endpoint = f"{scheme}://{self._bucket}.{host}"
            config["endpoint"] = config["aws_endpoint_url_s3"] = endpoint
        return config

    def _limits(self) -> Any:
        client: ClientConfig = {"connect_timeout": CONNECT, "read_timeout": READ, "timeout": WHOLE_STREAM}
        if self._over_http:
            client["allow_http"] = True
        retry: RetryConfig = {"max_retries": RETRIES, "retry_timeout": RETRY_FOR}
        return {"client_options": client, "retry_config": retry}

    def redact(self, text: str) -> str:
        """Return the text with all secrets of this connection replaced by ***."""
        secrets = [value for name, value in self.options.items() if SECRET.search(name) and value]
        if "_identity" in vars(self):
            secrets += self._identity.secrets_in_use()
        for secret in sorted(secrets, key=len, reverse=True):
            text = text.replace(secret, "***")
        return text


def _revealed(options: "dict[str, SecretStr]") -> dict[str, str]:
    return {name: value.get_secret_value() for name, value in options.items()}


def _local_path(uri: str, url: SplitResult, named: str) -> Path:
    if url.scheme == "":
        return Path(uri).absolute()
    if url.netloc not in ("", "localhost") or not url.path.startswith("/"):
        raise StartRefused(f"{named} must look like file:///path or be a path")
    return Path(unquote(url.path))
