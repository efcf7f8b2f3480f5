"""Webhooks of tenants, set by the lake's administrator."""

from tarn.access import tenants
from tarn.api.http.problems import raises
from tarn.api.http.route_access import CallerDep
from tarn.api.http.routing import router
from tarn.api.http.services.container import Services, ServicesDep
from tarn.archive.urls import Url
from tarn.coordination import webhooks
from tarn.errors import Fault, SchemaViolation, SourceFailed, TenantNotFound, WebhookNotFound
from tarn.model.names import TenantName
from tarn.model.webhook import NewWebhook, Webhook

routes = router("/v1/admin/tenants/{tenant}/webhooks", "admin")


@routes.get("", responses=raises(TenantNotFound, WebhookNotFound))
def get_webhook(house: ServicesDep, tenant: TenantName) -> Webhook:
    """Show a tenant's webhook and how its deliveries go."""
    with house.database.read() as connection:
        tenants.get(connection, tenant)
        return webhooks._get(connection, tenant)


@routes.put("", responses=raises(TenantNotFound))
def set_webhook(house: ServicesDep, caller: CallerDep, tenant: TenantName, new: NewWebhook) -> Webhook:
    """Set where a tenant's events are sent: those from now on, or from where it was before; one given up goes on."""
    _check_url(house, new.url)
    with house.database.write() as connection:
        tenants.get(connection, tenant)
        changed = webhooks._put(connection, tenant, new)
        caller.act.done(connection, kinds=[*new.kinds], datasets=[*new.datasets], secret=new.secret is not None)
    return changed


@routes.delete("", status_code=204, responses=raises(TenantNotFound, WebhookNotFound))
def delete_webhook(house: ServicesDep, caller: CallerDep, tenant: TenantName) -> None:
    """Send a tenant nothing any more."""
    with house.database.write() as connection:
        tenants.get(connection, tenant)
        if not webhooks.remove(connection, tenant):
            raise WebhookNotFound(f"{tenant!r} has no webhook")
        caller.act.done(connection)


def _check_url(house: Services, written: str) -> None:
    """Raise SchemaViolation for an address that nothing is sent to. Each delivery looks again."""
    try:
        url = Url.parse(written)
        house.fetcher.web.guard.addresses(url.host, url.port)
    except SchemaViolation as error:
        reason = error.members["errors"][0].reason
        raise SchemaViolation(
            f"nothing can be sent there: {reason}", errors=[Fault(field="url", reason=reason)]
        ) from None
    except SourceFailed:
        pass  # a name that nobody knows today may be known tomorrow
