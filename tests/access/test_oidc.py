"""Tokens of a real issuer: a server that publishes its keys, and tokens signed with them."""

import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from jwt.algorithms import RSAAlgorithm
from tarn.access import grants, oidc, tenants
from tarn.access.bootstrap import ensure_admin
from tarn.access.identity import Authenticator
from tarn.access.oidc import Issuer
from tarn.db.engine import Database
from tarn.errors import Unauthenticated, Unavailable
from tarn.model.tenant import Identity, NewGrant, NewTenant
from tarn.settings import Settings


class FakeIssuer:
    """An OpenID Connect issuer on loopback."""

    def __init__(self) -> None:
        self.key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self.requested: list[str] = []
        self.reached = threading.Event()
        self.going = threading.Event()
        """While it is not set, the issuer takes its time."""
        self.going.set()
        self.status = 200
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.requested.append(self.path)
                outer.reached.set()
                outer.going.wait(30)
                jwk = json.loads(RSAAlgorithm.to_jwk(outer.key.public_key())) | {"kid": "k1", "use": "sig"}
                body = {"jwks_uri": f"{outer.url}/keys"} if "openid" in self.path else {"keys": [jwk]}
                self.send_response(outer.status)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=[0.01], daemon=True).start()

    def token(self, key: Any = None, algorithm: str = "RS256", kid: str = "k1", **claims: Any) -> str:
        body = {
            "iss": self.url,
            "aud": "tarn",
            "sub": "someone",
            "tenant": "alice",
            "exp": datetime.now(UTC) + timedelta(minutes=5),
        } | claims
        present = {name: value for name, value in body.items() if value is not None}
        return jwt.encode(present, self.key if key is None else key, algorithm=algorithm, headers={"kid": kid})


@pytest.fixture
def issuer() -> Iterator[FakeIssuer]:
    issuer = FakeIssuer()
    yield issuer
    issuer.going.set()
    issuer.server.shutdown()
    issuer.server.server_close()


@pytest.fixture
def authenticator(issuer: FakeIssuer, database: Database, settings: Settings) -> Authenticator:
    settings = settings.model_copy(update={"oidc_issuer": issuer.url, "oidc_audience": "tarn"})
    with database.write() as connection:
        alice = tenants.create(connection, NewTenant.model_validate({"name": "alice"})).name
        grants.create(connection, alice, NewGrant.model_validate({"dataset": "press_*", "level": "write"}))
    return Authenticator(database, settings, Issuer(settings))


def test_token_of_the_issuer_authenticates_its_tenant(issuer: FakeIssuer, authenticator: Authenticator):
    identity = _identity(authenticator, issuer.token())

    assert (identity.tenant, identity.key) == ("alice", "oidc:someone")
    assert identity.level_on("press_leaks") == "write"


OTHER_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)


@pytest.mark.parametrize(
    "changes",
    [
        {"aud": "another-audience"},
        {"aud": None},
        {"iss": "https://evil.example"},
        {"exp": datetime.now(UTC) - timedelta(minutes=5)},
        {"exp": None},
        {"tenant": None},
        {"tenant": "nobody"},
        {"tenant": "lakehouse"},
        {"tenant": "../alice"},
        {"key": OTHER_KEY},
        {"kid": "unknown"},
        {"key": "a secret of thirty-two characters!", "algorithm": "HS256"},
        {"key": "", "algorithm": "none"},
    ],
)
def test_invalid_token_is_refused(issuer: FakeIssuer, authenticator: Authenticator, changes):
    with pytest.raises(Unauthenticated, match="send a valid key"):
        _identity(authenticator, issuer.token(**changes))


@pytest.fixture
def deputy(authenticator: Authenticator, database: Database) -> None:
    """Return a tenant that has the grants of the administrator."""
    with database.write() as connection:
        name = tenants.create(connection, NewTenant.model_validate({"name": "deputy"})).name
        grants.create(connection, name, NewGrant.model_validate({"dataset": "*", "level": "admin"}))


@pytest.mark.usefixtures("deputy")
@pytest.mark.parametrize("name", ["admin", "deputy"])
def test_token_that_names_an_administrator_is_refused(
    issuer: FakeIssuer, authenticator: Authenticator, database: Database, settings: Settings, name: str
):
    ensure_admin(database, settings)

    for _ in range(2):  # also when the identity is cached
        with pytest.raises(Unauthenticated, match=f"names the tenant '{name}'.*TARN_OIDC_ALLOW_ADMIN") as refused:
            _identity(authenticator, issuer.token(tenant=name))
        assert refused.value.key == "oidc:someone"
    assert _identity(authenticator, issuer.token()).tenant == "alice"


@pytest.mark.usefixtures("deputy")
@pytest.mark.parametrize("name", ["admin", "deputy"])
def test_token_that_names_an_administrator_is_accepted_if_a_setting_allows_it(
    issuer: FakeIssuer, database: Database, settings: Settings, name: str
):
    ensure_admin(database, settings)
    allowing = {"oidc_issuer": issuer.url, "oidc_audience": "tarn", "oidc_allow_admin": True}
    settings = settings.model_copy(update=allowing)

    identity = _identity(Authenticator(database, settings, Issuer(settings)), issuer.token(tenant=name))

    assert (identity.tenant, identity.administers_lake) == (name, True)


@pytest.mark.usefixtures("deputy")
def test_token_is_refused_from_the_request_after_its_tenant_became_administrator(
    issuer: FakeIssuer, authenticator: Authenticator, database: Database
):
    before = _identity(authenticator, issuer.token())
    with database.write() as connection:
        grants.create(connection, before.tenant, NewGrant.model_validate({"dataset": "*", "level": "admin"}))

    with pytest.raises(Unauthenticated, match="administers the lake"):
        _identity(authenticator, issuer.token())


@pytest.mark.parametrize(
    "claim", ["Admin", "ADMIN", " admin", "admin ", "admin\n", ["admin"], {"admin": True}, True, "\uff41dmin"]
)
def test_claim_that_resembles_the_administrators_name_is_not_the_administrator(
    issuer: FakeIssuer, authenticator: Authenticator, database: Database, settings: Settings, claim: object
):
    ensure_admin(database, settings)

    with pytest.raises(Unauthenticated, match="send a valid key"):
        _identity(authenticator, issuer.token(tenant=claim))


def test_configured_claim_names_the_tenant_but_never_an_administrator(
    issuer: FakeIssuer, authenticator: Authenticator, database: Database, settings: Settings
):
    ensure_admin(database, settings)
    mapped = {"oidc_issuer": issuer.url, "oidc_audience": "tarn", "oidc_tenant_claim": "nickname"}
    settings = settings.model_copy(update=mapped)
    mapping = Authenticator(database, settings, Issuer(settings))

    assert _identity(mapping, issuer.token(tenant="admin", nickname="alice")).tenant == "alice"
    with pytest.raises(Unauthenticated, match="administers the lake"):
        _identity(mapping, issuer.token(tenant="alice", nickname="admin"))


def test_unknown_key_ids_do_not_cause_a_request_each(issuer: FakeIssuer, authenticator: Authenticator):
    for number in range(20):
        with pytest.raises(Unauthenticated):
            _identity(authenticator, issuer.token(kid=f"k-{number}"))

    assert len(issuer.requested) == 2


def test_unreachable_issuer_is_unavailable_and_not_a_refusal(issuer: FakeIssuer, authenticator: Authenticator):
    token = issuer.token()
    issuer.server.shutdown()
    issuer.server.server_close()

    with pytest.raises(Unavailable):
        _identity(authenticator, token)


def test_slow_issuer_is_requested_by_one_caller_and_no_other_waits(issuer: FakeIssuer, authenticator: Authenticator):
    issuer.going.clear()
    outcomes: list[object] = []

    def first() -> None:
        outcomes.append(_identity(authenticator, issuer.token()).tenant)

    thread = threading.Thread(target=first)
    thread.start()
    issuer.reached.wait(10)

    # If they waited, it would be for the issuer, which waits for this thread: a deadlock.
    for number in range(100):
        with pytest.raises(Unavailable) as unavailable:
            _identity(authenticator, issuer.token(kid=f"k-{number}"))
        assert unavailable.value.retry_after
    issuer.going.set()
    thread.join()

    assert outcomes == ["alice"]
    assert len(issuer.requested) == 2


def test_failed_request_to_the_issuer_is_not_repeated_at_once(issuer: FakeIssuer, authenticator: Authenticator):
    issuer.status = 500

    for _ in range(20):
        with pytest.raises(Unavailable):
            _identity(authenticator, issuer.token())

    assert len(issuer.requested) == 1


def test_cached_keys_are_used_while_the_issuer_is_unavailable(
    issuer: FakeIssuer, authenticator: Authenticator, monkeypatch: pytest.MonkeyPatch
):
    _identity(authenticator, issuer.token())
    issuer.status = 500
    monkeypatch.setattr(oidc, "REFRESH_SECONDS", 0.0)
    monkeypatch.setattr(oidc, "MIN_FETCH_INTERVAL", 0.0)

    tenants = {_identity(authenticator, issuer.token()).tenant for _ in range(3)}
    with pytest.raises(Unavailable):
        _identity(authenticator, issuer.token(kid="rotated"))

    assert tenants == {"alice"}
    assert len(issuer.requested) > 3


def _identity(authenticator: Authenticator, token: str) -> Identity:
    with authenticator.identified(f"Bearer {token}") as sight:
        return sight.identity
