"""Tag routes: a tenant's own tags, and read access to the tags that Tarn sets itself."""

from typing import Annotated

from fastapi import Query

from tarn.api.http.paging import Page, PagingDep
from tarn.api.http.problems import raises
from tarn.api.http.route_access import CallerDep, DatasetDep
from tarn.api.http.routing import router
from tarn.api.http.services.container import ServicesDep
from tarn.errors import AlreadyExists, Forbidden, QuotaExceeded, TagNotFound
from tarn.model.datasets.tag import Latest, NewTag, Tag
from tarn.model.names import TagKey

routes = router("/v1/datasets/{dataset}", "tags")

MOST_DEPENDENCIES = 100

KeyParam = Annotated[TagKey, Query(description="The tag's key. Tags that Tarn sets itself begin with `lakehouse/`.")]
DependencyParam = Annotated[
    list[TagKey],
    Query(max_length=MOST_DEPENDENCIES, description="Keys of tags that it must be newer than; repeatable."),
]
PrefixParam = Annotated[
    str,
    Query(
        max_length=TagKey.longest,
        pattern=r"^[A-Za-z0-9._:/-]*$",
        description="List only keys that begin with this; `lakehouse/` lists the tags that Tarn sets itself.",
    ),
]


class TagPage(Page[Tag]):
    """Tags, sorted by key."""


@routes.get("/tags")
def list_tags(
    services: ServicesDep, caller: CallerDep, dataset: DatasetDep, paging: PagingDep, prefix: PrefixParam = ""
) -> TagPage:
    """List the caller's tags on a dataset, or those that Tarn sets itself."""
    tags = services.tags.page(dataset, caller.identity.tenant, prefix, paging.after, paging.fetch)
    results, cursor = paging.cut(tags, lambda tag: tag.key)
    return TagPage(results=results, next=cursor)


@routes.get("/tag", responses=raises(TagNotFound))
def get_tag(services: ServicesDep, caller: CallerDep, dataset: DatasetDep, key: KeyParam) -> Tag:
    """Get a tag."""
    return services.tags.get(dataset, caller.identity.tenant, key)


@routes.put("/tag", responses=raises(AlreadyExists, Forbidden, QuotaExceeded))
def set_tag(
    services: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    key: KeyParam,
    new: NewTag = NewTag(),  # noqa: B008 - the same for all
) -> Tag:
    """Set a tag to the time in the body, by default to now."""
    return services.tags.set(dataset, caller.identity.tenant, key, new, caller.act)


@routes.delete("/tag", status_code=204, responses=raises(TagNotFound, Forbidden))
def delete_tag(services: ServicesDep, caller: CallerDep, dataset: DatasetDep, key: KeyParam) -> None:
    """Delete a tag."""
    services.tags.delete(dataset, caller.identity.tenant, key, caller.act)


@routes.get("/tag/is_latest")
def is_latest_tag(
    services: ServicesDep, caller: CallerDep, dataset: DatasetDep, key: KeyParam, dep: DependencyParam
) -> Latest:
    """Check whether a tag exists and is strictly newer than each of some other tags that exist."""
    return services.tags.compare(dataset, caller.identity.tenant, key, dep)
