"""Webhook routes: an administrator of the lake sets the webhooks of tenants."""

from tarn.api.http.problems import raises
from tarn.api.http.route_access import CallerDep
from tarn.api.http.routing import router
from tarn.api.http.services.container import Services, ServicesDep
from tarn.archive.fetching.urls import Url
from tarn.errors import FieldError, SchemaViolation, SourceFailed, TenantNotFound, WebhookNotFound
from tarn.model.names import TenantName
from tarn.model.work.webhook import NewWebhook, Webhook

routes = router("/v1/admin/tenants/{tenant}/webhooks", "admin")


@routes.get("", responses=raises(TenantNotFound, WebhookNotFound))
def get_webhook(services: ServicesDep, tenant: TenantName) -> Webhook:
    """Get a tenant's webhook and the state of its deliveries."""
    return services.webhooks.get(tenant)


@routes.put("", responses=raises(TenantNotFound))
def set_webhook(services: ServicesDep, caller: CallerDep, tenant: TenantName, new: NewWebhook) -> Webhook:
    """Set a tenant's webhook. A new one gets events from now on; one in the state `given_up` resumes."""
    _check_url(services, new.url)
    return services.webhooks.set(tenant, new, caller.act)


@routes.delete("", status_code=204, responses=raises(TenantNotFound, WebhookNotFound))
def delete_webhook(services: ServicesDep, caller: CallerDep, tenant: TenantName) -> None:
    """Delete a tenant's webhook."""
    services.webhooks.delete(tenant, caller.act)


def _check_url(services: Services, text: str) -> None:
    """Raise SchemaViolation for a URL to which delivery is not allowed. Each delivery checks it again."""
    try:
        url = Url.parse(text)
        services.fetcher.web.guard.addresses(url.host, url.port)
    except SchemaViolation as error:
        reason = error.members["errors"][0].reason
        raise SchemaViolation(
            f"events cannot be sent to this URL: {reason}", errors=[FieldError(field="url", reason=reason)]
        ) from None
    except SourceFailed:
        pass  # a host name that does not resolve now may resolve later
