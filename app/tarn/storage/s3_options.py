"""Normalisation and validation of S3 options."""

import difflib
import os
from collections.abc import Mapping
from urllib.parse import urlsplit

import botocore.session
from botocore.exceptions import BotoCoreError

from tarn.errors import StartRefused

ALIASES = {
    "endpoint_url": "endpoint",
    "endpoint_url_s3": "endpoint",
    "default_region": "region",
    "token": "session_token",
}
OURS = frozenset({"access_key_id", "secret_access_key", "session_token", "endpoint", "region", "allow_http"})
PASSED_ON = frozenset(
    {
        "virtual_hosted_style_request",
        "server_side_encryption",
        "sse_kms_key_id",
        "sse_bucket_key_enabled",
        "unsigned_payload",
        "checksum_algorithm",
        "copy_if_not_exists",
        "disable_tagging",
        "disable_bulk_delete",
    }
)
"""Passed unchanged to obstore and deltalake. Readers of the data need none of these but the first."""


def s3_options(given: Mapping[str, str]) -> dict[str, str]:
    """Return the options under canonical names (no `aws_`, lower case). Raises StartRefused.

    Endpoint and region are taken from the environment if absent, so that a copy of the options in another process
    refers to the same store.
    """
    options: dict[str, str] = {}
    for key, value in given.items():
        name = key.lower().removeprefix("aws_")
        name = ALIASES.get(name, name)
        if name not in OURS | PASSED_ON:
            near = difflib.get_close_matches(name, OURS | PASSED_ON, n=1)
            hint = f"; did you mean aws_{near[0]}?" if near else ""
            raise StartRefused(f"TARN_STORAGE_OPTIONS: {key} is not an option of an s3:// lake{hint}")
        if name in options:
            raise StartRefused(f"TARN_STORAGE_OPTIONS: {key} is set twice, under different names")
        options[name] = value
    if ("access_key_id" in options) != ("secret_access_key" in options):
        raise StartRefused("TARN_STORAGE_OPTIONS: set both aws_access_key_id and aws_secret_access_key, or neither")
    if "session_token" in options and "access_key_id" not in options:
        raise StartRefused("TARN_STORAGE_OPTIONS: aws_session_token needs aws_access_key_id")
    profile = _profile()
    if "endpoint" not in options and (endpoint := _ambient_endpoint(profile)):
        options["endpoint"] = endpoint
    if "endpoint" in options:
        options["endpoint"] = _checked_endpoint(options)
    options.pop("allow_http", None)
    options.setdefault("region", _ambient_region(profile))
    return options


def _checked_endpoint(options: Mapping[str, str]) -> str:
    endpoint = urlsplit(options["endpoint"])
    if endpoint.scheme not in {"http", "https"} or not endpoint.hostname or "@" in endpoint.netloc:
        raise StartRefused("the S3 endpoint must look like https://host:port")
    if endpoint.scheme == "http" and options.get("allow_http", "true").lower() == "false":
        raise StartRefused("the S3 endpoint is http:// and allow_http is false")
    return options["endpoint"].rstrip("/")


def _profile() -> dict[str, str]:
    try:
        profile: dict[str, str] = botocore.session.get_session().get_scoped_config()
    except BotoCoreError:
        raise StartRefused("the AWS profile that the environment names cannot be read") from None
    return profile


def _ambient_endpoint(profile: Mapping[str, str]) -> str | None:
    variables = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    return next((os.environ[name] for name in variables if os.environ.get(name)), profile.get("endpoint_url"))


def _ambient_region(profile: Mapping[str, str]) -> str:
    variables = ("AWS_REGION", "AWS_DEFAULT_REGION")
    found = next((os.environ[name] for name in variables if os.environ.get(name)), profile.get("region"))
    return found or "us-east-1"
