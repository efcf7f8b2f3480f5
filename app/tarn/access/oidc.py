"""Verification of JWTs of one OpenID Connect issuer."""

import threading
import time

import httpx
import jwt
import structlog
from jwt import PyJWK, PyJWKSet

from tarn.errors import Unavailable
from tarn.model.names import TenantName
from tarn.settings import Settings

log = structlog.get_logger(__name__)

ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
"""Asymmetric ones only: with HS256 the public key would be the secret."""

TIMEOUT = 5.0
REFRESH_SECONDS = 300.0
"""Seconds after which the issuer's keys are fetched again; while that fails, the old ones stay in use."""
MIN_FETCH_INTERVAL = 10.0
"""Minimum seconds between two fetches for an unknown key id: an invented id must not cause a fetch every time."""


class Issuer:
    """Verifies tokens of the configured issuer and names their tenant.

    Anyone can send a token that causes a fetch from the issuer, which may be slow. So only one thread at a time
    fetches, at most once in `MIN_FETCH_INTERVAL` seconds whether or not it succeeds, and no other thread waits for the
    result.
    """

    def __init__(self, settings: Settings) -> None:
        assert settings.oidc_issuer is not None
        self._issuer = settings.oidc_issuer
        self._audience = settings.oidc_audience
        self._claim = settings.oidc_tenant_claim
        self._jwks_url = settings.oidc_jwks_url
        self._lock = threading.Lock()
        self._keys: dict[str | None, PyJWK] = {}
        self._fetch_started = float("-inf")
        self._is_fetching = False
        self._is_complete = False
        """Whether the last fetch has completed successfully: then an unknown key id does not exist."""

    def tenant_of(self, token: str) -> tuple[TenantName, str] | None:
        """Return the tenant of a token and a label of the token for logs; None if the token is invalid.

        Raises Unavailable if the issuer's keys are needed and cannot be fetched.
        """
        try:
            key = self._key(jwt.get_unverified_header(token).get("kid"))
            claims = jwt.decode(
                token,
                key,
                algorithms=ALGORITHMS,
                audience=self._audience,
                issuer=self._issuer,
                options={"require": ["exp", "iss", "aud"]},
            )
            return TenantName(str(claims[self._claim])), f"oidc:{claims.get('sub', '')}"[:36]
        except (jwt.PyJWTError, KeyError, ValueError):
            return None

    def _key(self, kid: str | None) -> PyJWK:
        if self._must_refresh(kid):
            self._refresh()
        with self._lock:
            if kid not in self._keys and not self._is_complete:
                raise Unavailable(
                    "the OpenID Connect issuer's keys cannot be fetched", retry_after=int(MIN_FETCH_INTERVAL)
                )
            return self._keys[kid]

    def _must_refresh(self, kid: str | None) -> bool:
        """Return whether this thread has to fetch the keys; if so, mark the fetch as started."""
        with self._lock:
            age = time.monotonic() - self._fetch_started
            is_needed = kid not in self._keys or not self._is_complete
            if self._is_fetching or not (age > REFRESH_SECONDS or (is_needed and age > MIN_FETCH_INTERVAL)):
                return False
            self._fetch_started, self._is_fetching, self._is_complete = time.monotonic(), True, False
            return True

    def _refresh(self) -> None:
        keys: dict[str | None, PyJWK] | None = None
        try:
            keys = {key.key_id: key for key in self._fetch().keys}
        except (httpx.HTTPError, httpx.InvalidURL, jwt.PyJWTError, KeyError, TypeError, ValueError):
            log.warning("the OpenID Connect issuer's keys cannot be fetched", issuer=self._issuer, exc_info=True)
        finally:
            with self._lock:
                self._is_fetching = False
                if keys is not None:
                    self._keys, self._is_complete = keys, True

    def _fetch(self) -> PyJWKSet:
        with httpx.Client(timeout=TIMEOUT) as client:
            if self._jwks_url is None:
                discovery = client.get(f"{self._issuer.rstrip('/')}/.well-known/openid-configuration")
                self._jwks_url = str(discovery.raise_for_status().json()["jwks_uri"])
            return PyJWKSet.from_dict(client.get(self._jwks_url).raise_for_status().json())


def configured_issuer(settings: Settings) -> Issuer | None:
    return Issuer(settings) if settings.oidc_issuer else None
