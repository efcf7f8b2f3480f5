"""The audit log under a flood."""

from app.db.engine import Database
from app.errors import Unauthenticated
from app.tenancy import audit
from app.tenancy.audit import Act, Denials


def test_flood_of_denials_is_written_down_only_up_to_its_rate(database: Database):
    denials = Denials(database, per_second=3)

    for number in range(200):
        denials.record(Act(None, "whoami", "/v1/whoami", f"r{number}"), Unauthenticated("no"))

    with database.read() as connection:
        written = audit.page(connection, None, None, 1000)
    assert 3 <= len(written) < 50
