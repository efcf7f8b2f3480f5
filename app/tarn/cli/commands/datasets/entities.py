"""Entities: loaded, looked at, asked for, deleted."""

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tarn.cli.commands.datasets.datasets import BASE
from tarn.cli.completion import dataset_names
from tarn.cli.failures import Failure, Misuse, ProblemAnswered
from tarn.cli.input.files import STDIN, entity_type, opened
from tarn.cli.input.upload import load as send
from tarn.cli.options import (
    At,
    Commit,
    Fresh,
    Ids,
    OneOrigin,
    OnError,
    Origin,
    Origins,
    Out,
    Quiet,
    Schema,
    Schemata,
    Source,
    Strict,
    Values,
)
from tarn.cli.output.invalid_entities import OmittedEntities
from tarn.cli.output.streams import line, print_records, printing
from tarn.cli.paths import at as path_of
from tarn.cli.session import CommandSession, client_command

if TYPE_CHECKING:
    from tarn.cli.connection import Client

app = typer.Typer(no_args_is_help=True, help="Entities: loaded, looked at, asked for, deleted.")

PAGE = 1000
FLUSH_SECONDS = 60.0
"""How long a server takes at most over the flush that a read asks for."""

ROUTE_NAMES = ("stream", "invalid")
"""Names of routes where the id of an entity may stand: entities with these ids are read by a list."""

KINDS = {"ndjson": "application/x-ndjson", "json": "application/json"}

Dataset = Annotated[str, typer.Argument(metavar="DATASET", help="The dataset's name.", autocompletion=dataset_names)]
EntityId = Annotated[str, typer.Argument(metavar="ID", help="An entity id, canonical id or referent.")]


@client_command(app, "get")
def get(
    session: CommandSession,
    dataset: Dataset,
    entity: EntityId,
    origin: OneOrigin = None,
    at: At = None,
    fresh: Fresh = None,
) -> None:
    """Show an entity.

    Example: tarn entities get donations jane --json
    """
    params = {"origin": origin, "at": at, "fresh": fresh}
    if entity in ROUTE_NAMES:
        session.output.record(_named_like_a_route(session.client, dataset, entity, params))
        return
    found = session.client.document("GET", _path(dataset, entity), params=params, wait=FLUSH_SECONDS)
    session.output.record(found)


@client_command(app, "query")
def query(
    session: CommandSession,
    dataset: Dataset,
    where: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="A condition in the API's language; @FILE reads it, - is standard input."),
    ] = None,
    schema: Schema = None,
    schemata: Schemata = None,
    id_: Ids = None,
    origin: Origins = None,
    sort: Annotated[
        list[str] | None, typer.Option(metavar="FIELD", help="A field, -field for the other way; repeatable.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many entities.")] = None,
    at: At = None,
    fresh: Fresh = None,
    out: Out = "-",
    quiet: Quiet = False,
) -> None:
    """Print the entities that match, a line of JSON each; all of them if nothing is asked for.

    Example: tarn entities query donations --schemata LegalEntity > entities.ndjson

    Example: tarn entities query donations --where '{"field": "prop:name", "op": "contains", "value": "Doe"}' --limit 10
    """
    filters = {"id": id_, "schema": schema, "schemata": schemata, "origin": origin}
    state = {"at": at, "fresh": fresh}
    left_out = OmittedEntities(dataset)
    if where is None and not sort:
        print_records(session, _path(dataset, "stream"), {**filters, **state}, out, quiet, limit, left_out)
    else:
        question = {"where": _condition(where, filters), "sort": sort or []}
        with printing(session, out, quiet, limit) as write:
            for lines in _pages(session.client, _path(dataset, "query"), question, state, limit, left_out):
                write(lines)
    left_out.summarise()


@client_command(app, "invalid")
def invalid(
    session: CommandSession,
    dataset: Dataset,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many entities.")] = None,
    at: At = None,
    fresh: Fresh = None,
    out: Out = "-",
    quiet: Quiet = False,
) -> None:
    """Print the entities whose statements do not assemble, a line of JSON each: id, reason, schemata of each origin.

    Example: tarn entities invalid donations | jq -r '[.id, .reason] | @tsv'
    """
    found = session.client.each(_path(dataset, "invalid"), limit, at=at, fresh=fresh)
    with printing(session, out, quiet, limit) as write:
        for entity in found:
            write(line(entity))


@client_command(app, "load")
def load(
    session: CommandSession,
    dataset: Dataset,
    file: Source,
    origin: Origin = None,
    on_error: OnError = "abort",
    values: Values = None,
    strict: Strict = False,
    commit: Commit = "auto",
    kind: Annotated[
        Literal["ndjson", "json"] | None,
        typer.Option("--format", help="What it is, where neither its name nor its beginning tells."),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Load entities: JSON, one a line or in an array. They are durable when the command is done: all of them, or none.

    Example: zcat entities.ftm.json.gz | ftm validate | tarn entities load donations - --origin crawl
    """
    params = {"origin": origin, "on_error": on_error, "values": values, "strict": strict, "commit": commit}
    with opened(file) as source:
        send(session, _path(dataset), source, KINDS[kind] if kind else entity_type(source), params, quiet)


@client_command(app, "delete")
def delete(
    session: CommandSession,
    dataset: Dataset,
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Entity ids; - reads them, one a line.")],
    origin: OneOrigin = None,
) -> None:
    """Delete entities: what one origin says of them, or all. Snapshots that hold them stay as they are.

    Example: tarn entities query donations --schema Page | jq -r .id | tarn entities delete donations -
    """
    done = {"entities": 0, "tombstones": 0}
    try:
        for entity in _each_id(ids):
            answer = session.client.document("DELETE", _path(dataset, entity), params={"origin": origin})
            done["entities"] += answer["tombstones"] > 0
            done["tombstones"] += answer["tombstones"]
    except Failure:
        if done["entities"]:
            session.output.note(f"{done['entities']} entities are deleted, and the others are not:")
        raise
    session.output.record(done)


@client_command(app, "adjacent")
def adjacent(
    session: CommandSession,
    dataset: Dataset,
    entity: EntityId,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many.")] = None,
    at: At = None,
    fresh: Fresh = None,
) -> None:
    """List the entities that an entity refers to and that refer to it, by property."""
    beside = session.client.each(_path(dataset, entity, "adjacent"), limit, at=at, fresh=fresh)
    shown = beside if session.output.as_json else ({**(one["entity"] or {}), **one} for one in beside)
    session.output.table(shown, "property", "outgoing", "id", "schema", "caption")


def _path(dataset: str, *below: str) -> str:
    return path_of(BASE, dataset, "entities", *below)


def _condition(where: str | None, filters: dict[str, list[str] | None]) -> Any:
    """The condition and the filters, as one. Raises Misuse if it is not JSON."""
    parts = [{"field": field, "op": "in", "value": values} for field, values in filters.items() if values]
    if where is None:
        return {"and": parts} if parts else None
    try:
        condition = json.loads(_text(where))
    except ValueError as error:
        raise Misuse(f"--where is not valid JSON: {error}") from None
    return {"and": [condition, *parts]} if parts else condition


def _text(where: str) -> str:
    if where != STDIN and not where.startswith("@"):
        return where
    try:
        if where == STDIN:
            return sys.stdin.read()
        with open(where[1:], encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise Misuse(f"{where[1:]} cannot be read: {error.strerror or error}") from None


def _named_like_a_route(client: "Client", dataset: str, entity: str, params: dict[str, Any]) -> dict[str, Any]:
    """Read an entity whose id is the name of a route. Raises what the route of entities would answer."""
    if params["origin"] is not None:
        raise Misuse(
            f"--origin cannot be given for the id {entity!r}, which is the name of a route: "
            f"use `tarn statements query {dataset} --id {entity} --origin {params['origin']}`"
        )
    page = client.document("GET", _path(dataset), params={**params, "id": entity}, wait=FLUSH_SECONDS)
    found = sorted([*page["results"], *page["invalid"]], key=lambda one: (one["id"] != entity, one["id"]))
    if not found:
        detail = f"there is no entity {entity!r} in {dataset!r}"
        raise ProblemAnswered({"type": "/problems/entity-not-found", "status": 404, "detail": detail})
    if found[0] in page["invalid"]:
        detail = f"the entity {entity!r} cannot be put together: {found[0]['reason']}"
        raise ProblemAnswered({"type": "/problems/schema-violation", "status": 422, "detail": detail})
    shown: dict[str, Any] = found[0]
    return shown


def _pages(
    client: "Client",
    path: str,
    question: dict[str, Any],
    state: dict[str, Any],
    limit: int | None,
    left_out: OmittedEntities,
) -> Iterator[bytes]:
    """What a query finds, a page at a time, as lines."""
    cursor, left = None, limit
    while left is None or left > 0:
        size = PAGE if left is None else min(PAGE, left)
        body = {**question, "limit": size, "cursor": cursor}
        page = client.document("POST", path, body, params=state, wait=FLUSH_SECONDS)
        for entity in page["invalid"]:
            left_out.add(entity)
        yield b"".join(line(entity) for entity in page["results"])
        cursor, left = page["next"], None if left is None else left - len(page["results"])
        if cursor is None:
            return


def _each_id(ids: list[str]) -> Iterator[str]:
    for entity in ids:
        if entity == STDIN:
            yield from (read.strip() for read in sys.stdin if read.strip())
        else:
            yield entity
