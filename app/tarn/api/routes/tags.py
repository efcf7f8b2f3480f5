"""Tags: the caller's own, and the core's to be read."""

from typing import Annotated

from fastapi import Query

from tarn.api.http.paging import Page, PagingDep
from tarn.api.http.problems import raises
from tarn.api.http.route_access import CallerDep, DatasetDep
from tarn.api.http.routing import router
from tarn.api.http.services.container import ServicesDep
from tarn.coordination import tags
from tarn.errors import AlreadyExists, Forbidden, QuotaExceeded, TagNotFound
from tarn.model.names import TagKey
from tarn.model.tag import Latest, NewTag, Tag, newer_tags

routes = router("/v1/datasets/{dataset}", "tags")

MOST_DEPENDENCIES = 100

KeyParam = Annotated[TagKey, Query(description="The core's own tags begin with `lakehouse/`.")]
DependencyParam = Annotated[
    list[TagKey], Query(max_length=MOST_DEPENDENCIES, description="Tags that it must be newer than; repeatable.")
]
PrefixParam = Annotated[
    str,
    Query(
        max_length=TagKey.longest,
        pattern=r"^[A-Za-z0-9._:/-]*$",
        description="What keys begin with; `lakehouse/` lists the core's.",
    ),
]


class TagPage(Page[Tag]):
    """Tags by key."""


@routes.get("/tags")
def list_tags(
    house: ServicesDep, caller: CallerDep, dataset: DatasetDep, paging: PagingDep, prefix: PrefixParam = ""
) -> TagPage:
    """List the caller's tags on a dataset, or those of the lake itself."""
    with house.database.read() as connection:
        found = tags.page(connection, dataset, caller.identity.tenant, prefix, paging.after, paging.fetch)
    results, cursor = paging.cut(found, lambda tag: tag.key)
    return TagPage(results=results, next=cursor)


@routes.get("/tag", responses=raises(TagNotFound))
def get_tag(house: ServicesDep, caller: CallerDep, dataset: DatasetDep, key: KeyParam) -> Tag:
    """Show a tag."""
    with house.database.read() as connection:
        return tags._get(connection, dataset, caller.identity.tenant, key)


@routes.put("/tag", responses=raises(AlreadyExists, Forbidden, QuotaExceeded))
def set_tag(
    house: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    key: KeyParam,
    new: NewTag = NewTag(),  # noqa: B008 - the same for all
) -> Tag:
    """Set a tag, to now unless the body says otherwise."""
    tenant = caller.identity.tenant
    with house.database.write() as connection:
        tag = tags.put(house.database, connection, dataset, tenant, key, new)
        caller.act.done(connection, key=key)
    tags.mirror(house.store, dataset, tenant, key, tag)
    return tag


@routes.delete("/tag", status_code=204, responses=raises(TagNotFound, Forbidden))
def delete_tag(house: ServicesDep, caller: CallerDep, dataset: DatasetDep, key: KeyParam) -> None:
    """Delete a tag."""
    tenant = caller.identity.tenant
    with house.database.write() as connection:
        tags.remove(connection, dataset, tenant, key)
        caller.act.done(connection, key=key)
    tags.mirror(house.store, dataset, tenant, key, None)


@routes.get("/tag/is_latest")
def is_latest_tag(
    house: ServicesDep, caller: CallerDep, dataset: DatasetDep, key: KeyParam, dep: DependencyParam
) -> Latest:
    """Tell whether a tag is there, and strictly newer than every one of some others that is."""
    with house.database.read() as connection:
        found = tags._times(connection, dataset, caller.identity.tenant, [key, *dep])
    at = found.get(key)
    newer = newer_tags(at, found, dep)
    return Latest(key=key, latest=at is not None and not newer, at=at, newer=newer)
