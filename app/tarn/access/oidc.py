"""JWTs of one OpenID Connect issuer."""

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
"""Seconds after which the issuer's keys are asked for again; while that fails, the old ones stay in use."""
MIN_FETCH_INTERVAL = 10.0
"""Seconds between two looks for a key that is not among them: a made-up key id must not make us ask every time."""


class Issuer:
    """Verifies tokens of the configured issuer and names their tenant.

    Anybody can send a token that makes us ask the issuer, and the issuer may be slow. So one caller at a time asks,
    at most once in `MIN_FETCH_INTERVAL` seconds whether or not it succeeds, and nobody else waits for the answer.
    """

    def __init__(self, settings: Settings) -> None:
        assert settings.oidc_issuer is not None
        self._issuer = settings.oidc_issuer
        self._audience = settings.oidc_audience
        self._claim = settings.oidc_tenant_claim
        self._jwks_url = settings.oidc_jwks_url
        self._lock = threading.Lock()
        self._keys: dict[str | None, PyJWK] = {}
        self._asked = float("-inf")
        self._asking = False
        self._answered = False
        """Whether the last look, if it is over, succeeded: then a key that is not among ours does not exist."""

    def tenant_of(self, token: str) -> tuple[TenantName, str] | None:
        """The tenant a token names, and a label of the token for logs; None if it is not valid here.

        Raises Unavailable if that cannot be told without keys that the issuer does not hand out just now.
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
        if self._is_our_turn(kid):
            self._refresh()
        with self._lock:
            if kid not in self._keys and not self._answered:
                raise Unavailable("the OpenID Connect issuer's keys cannot be had", retry_after=int(MIN_FETCH_INTERVAL))
            return self._keys[kid]

    def _is_our_turn(self, kid: str | None) -> bool:
        """Whether this caller is the one to ask; the time of it counts from now, however it ends."""
        with self._lock:
            age = time.monotonic() - self._asked
            wanted = kid not in self._keys or not self._answered
            if self._asking or not (age > REFRESH_SECONDS or (wanted and age > MIN_FETCH_INTERVAL)):
                return False
            self._asked, self._asking, self._answered = time.monotonic(), True, False
            return True

    def _refresh(self) -> None:
        found: dict[str | None, PyJWK] | None = None
        try:
            found = {key.key_id: key for key in self._fetch().keys}
        except (httpx.HTTPError, httpx.InvalidURL, jwt.PyJWTError, KeyError, TypeError, ValueError):
            log.warning("the OpenID Connect issuer's keys cannot be had", issuer=self._issuer, exc_info=True)
        finally:
            with self._lock:
                self._asking = False
                if found is not None:
                    self._keys, self._answered = found, True

    def _fetch(self) -> PyJWKSet:
        with httpx.Client(timeout=TIMEOUT) as client:
            if self._jwks_url is None:
                discovery = client.get(f"{self._issuer.rstrip('/')}/.well-known/openid-configuration")
                self._jwks_url = str(discovery.raise_for_status().json()["jwks_uri"])
            return PyJWKSet.from_dict(client.get(self._jwks_url).raise_for_status().json())


def configured_issuer(settings: Settings) -> Issuer | None:
    return Issuer(settings) if settings.oidc_issuer else None
