"""JWTs of one OpenID Connect issuer."""

import threading
import time

import httpx
import jwt
from jwt import PyJWK, PyJWKSet

from app.errors import Unauthenticated, Unavailable
from app.model.names import TenantName
from app.settings import Settings

ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
"""Asymmetric ones only: with HS256 the public key would be the secret."""

TIMEOUT = 5.0
KEEP = 300.0
"""Seconds for which the issuer's keys are kept."""
LEAST = 10.0
"""Seconds between two looks for a key that is not among them: a made-up key id must not make us ask every time."""


class Issuer:
    """Verifies tokens of the configured issuer and names their tenant."""

    def __init__(self, settings: Settings) -> None:
        assert settings.oidc_issuer is not None
        self._issuer = settings.oidc_issuer
        self._audience = settings.oidc_audience
        self._claim = settings.oidc_tenant_claim
        self._jwks_url = settings.oidc_jwks_url
        self._lock = threading.Lock()
        self._keys: dict[str | None, PyJWK] = {}
        self._fetched = float("-inf")

    def tenant_of(self, token: str) -> tuple[TenantName, str]:
        """The tenant a token names, and a label of the token for logs.

        Raises Unauthenticated for a token that is not valid here, Unavailable if the issuer's keys cannot be had.
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
            raise Unauthenticated("the token is not valid here") from None

    def _key(self, kid: str | None) -> PyJWK:
        with self._lock:
            age = time.monotonic() - self._fetched
            if age > KEEP or (kid not in self._keys and age > LEAST):
                self._keys = {key.key_id: key for key in self._fetch().keys}
                self._fetched = time.monotonic()
            return self._keys[kid]

    def _fetch(self) -> PyJWKSet:
        try:
            with httpx.Client(timeout=TIMEOUT) as client:
                if self._jwks_url is None:
                    discovery = client.get(f"{self._issuer.rstrip('/')}/.well-known/openid-configuration")
                    self._jwks_url = str(discovery.raise_for_status().json()["jwks_uri"])
                return PyJWKSet.from_dict(client.get(self._jwks_url).raise_for_status().json())
        except (httpx.HTTPError, jwt.PyJWTError, KeyError, ValueError) as error:
            raise Unavailable("the OpenID Connect issuer's keys cannot be had", retry_after=10) from error


def configured_issuer(settings: Settings) -> Issuer | None:
    return Issuer(settings) if settings.oidc_issuer else None
