"""What routes work with: made once in `main`, found by every request."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from app.api.metrics import Metrics
from app.db.engine import Database
from app.journal.writer import Writer
from app.model.entity import Exploder
from app.settings import Settings
from app.storage.store import Store
from app.tenancy.audit import Denials
from app.tenancy.identity import Authenticator
from app.tenancy.limits import Rate


@dataclass(frozen=True)
class Services:
    """One process's connections and counters."""

    settings: Settings
    database: Database
    store: Store
    authenticator: Authenticator
    rate: Rate
    denials: Denials
    metrics: Metrics
    writer: Writer
    exploder: Exploder
    """Of the event loop alone; a large body gets one of its own."""


def services(request: Request) -> Services:
    found = request.app.state.services
    assert isinstance(found, Services)
    return found


ServicesDep = Annotated[Services, Depends(services)]
