"""`tarn entities`: load, get, query and delete entities."""

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from tarn_client.dataset import ROUTE_NAMES
from tarn_client.dataset import Dataset as ClientDataset
from tarn_client.paths import path_of

from tarn.cli.connection import DATASETS, TIMEOUT
from tarn.cli.failures import FAILURES, Misuse
from tarn.cli.input.files import STDIN, entity_type, open_input
from tarn.cli.input.upload import load as send
from tarn.cli.options import (
    At,
    Commit,
    Dataset,
    Fresh,
    Ids,
    InputPath,
    OneOrigin,
    OnError,
    Origin,
    Origins,
    Out,
    Quiet,
    Schema,
    Schemata,
    Strict,
    Values,
)
from tarn.cli.output.invalid_entities import OmittedEntities
from tarn.cli.output.streams import line, print_records, printing
from tarn.cli.session import CommandSession, client_command

if TYPE_CHECKING:
    from tarn_client.connection import Connection

app = typer.Typer(no_args_is_help=True, help="Load, get, query and delete entities.")

FLUSH_SECONDS = 60.0
"""Maximum seconds that a server takes for the flush requested by a read."""

MEDIA_TYPES = {"ndjson": "application/x-ndjson", "json": "application/json"}

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
    if entity in ROUTE_NAMES:
        if origin is not None:
            raise Misuse(
                f"--origin cannot be given for the id {entity!r}, which is the name of a route: "
                f"use `tarn statements query {dataset} --id {entity} --origin {origin}`"
            )
        session.output.record(ClientDataset(session.connection, dataset).entity(entity, at=at, fresh=fresh))
        return
    params = {"origin": origin, "at": at, "fresh": fresh}
    session.output.record(
        session.connection.read(_path(dataset, entity), params=params, timeout=TIMEOUT + FLUSH_SECONDS)
    )


@client_command(app, "query")
def query(
    session: CommandSession,
    dataset: Dataset,
    where: Annotated[
        str | None,
        typer.Option(
            metavar="JSON", help="A condition in the API's query language; @FILE reads a file, - standard input."
        ),
    ] = None,
    schema: Schema = None,
    schemata: Schemata = None,
    id_: Ids = None,
    origin: Origins = None,
    sort: Annotated[
        list[str] | None, typer.Option(metavar="FIELD", help="Sort by this field, -field for descending; repeatable.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of entities.")] = None,
    at: At = None,
    fresh: Fresh = None,
    out: Out = "-",
    quiet: Quiet = False,
) -> None:
    """Print the matching entities, one JSON line each; all entities if no filter is given.

    Example: tarn entities query donations --schemata LegalEntity > entities.ndjson

    Example: tarn entities query donations --where '{"field": "prop:name", "op": "contains", "value": "Doe"}' --limit 10
    """
    filters = {"id": id_, "schema": schema, "schemata": schemata, "origin": origin}
    state = {"at": at, "fresh": fresh}
    omitted = OmittedEntities(dataset)
    if where is None and not sort:
        print_records(session, _path(dataset, "stream"), {**filters, **state}, out, quiet, limit, omitted)
    else:
        question = {"where": _condition(where, filters), "sort": sort or []}
        with printing(session, out, quiet, limit) as write:
            for lines in _pages(session.connection, _path(dataset, "query"), question, state, limit, omitted):
                write(lines)
    omitted.summarise()


@client_command(app, "invalid")
def invalid(
    session: CommandSession,
    dataset: Dataset,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of entities.")] = None,
    at: At = None,
    fresh: Fresh = None,
    out: Out = "-",
    quiet: Quiet = False,
) -> None:
    """Print the entities whose statements do not assemble, one JSON line each: id, reason, schemata by origin.

    Example: tarn entities invalid donations | jq -r '[.id, .reason] | @tsv'
    """
    entities = session.connection.each(_path(dataset, "invalid"), {"at": at, "fresh": fresh}, limit)
    with printing(session, out, quiet, limit) as write:
        for entity in entities:
            write(line(entity))


@client_command(app, "load")
def load(
    session: CommandSession,
    dataset: Dataset,
    file: InputPath,
    origin: Origin = None,
    on_error: OnError = "abort",
    values: Values = None,
    strict: Strict = False,
    commit: Commit = "auto",
    kind: Annotated[
        Literal["ndjson", "json"] | None,
        typer.Option("--format", help="Format of the file, if neither its name nor its first bytes show it."),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Load entities from NDJSON or a JSON array: all of them or none. They are durable when the command succeeds.

    Example: zcat entities.ftm.json.gz | ftm validate | tarn entities load donations - --origin crawl
    """
    params = {"origin": origin, "on_error": on_error, "values": values, "strict": strict, "commit": commit}
    with open_input(file) as source:
        send(session, _path(dataset), source, MEDIA_TYPES[kind] if kind else entity_type(source), params, quiet)


@client_command(app, "delete")
def delete(
    session: CommandSession,
    dataset: Dataset,
    ids: Annotated[
        list[str], typer.Argument(metavar="ID...", help="Entity ids; - reads one id per line from standard input.")
    ],
    origin: OneOrigin = None,
) -> None:
    """Delete entities: the statements of one origin, or all. Existing snapshots keep them.

    Example: tarn entities query donations --schema Page | jq -r .id | tarn entities delete donations -
    """
    done = {"entities": 0, "tombstones": 0}
    try:
        for entity in _each_id(ids):
            response = session.connection.write("DELETE", _path(dataset, entity), params={"origin": origin})
            done["entities"] += response["tombstones"] > 0
            done["tombstones"] += response["tombstones"]
    except FAILURES:
        if done["entities"]:
            session.output.note(f"{done['entities']} entities were deleted; the others were not:")
        raise
    session.output.record(done)


@client_command(app, "adjacent")
def adjacent(
    session: CommandSession,
    dataset: Dataset,
    entity: EntityId,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of entities.")] = None,
    at: At = None,
    fresh: Fresh = None,
) -> None:
    """List the entities that an entity refers to and that refer to it, by property."""
    neighbours = session.connection.each(_path(dataset, entity, "adjacent"), {"at": at, "fresh": fresh}, limit)
    shown = neighbours if session.output.as_json else ({**(row["entity"] or {}), **row} for row in neighbours)
    session.output.table(shown, "property", "outgoing", "id", "schema", "caption")


def _path(dataset: str, *below: str) -> str:
    return path_of(DATASETS, dataset, "entities", *below)


def _condition(where: str | None, filters: dict[str, list[str] | None]) -> Any:
    """Return the condition combined with the filters. Raises Misuse if it is not JSON."""
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


def _pages(
    connection: "Connection",
    path: str,
    question: dict[str, Any],
    state: dict[str, Any],
    limit: int | None,
    omitted: OmittedEntities,
) -> Iterator[bytes]:
    """Yield the results of a query as NDJSON, one page at a time."""
    for page in connection.pages(path, state, question, limit, timeout=TIMEOUT + FLUSH_SECONDS):
        for entity in page["invalid"]:
            omitted.add(entity)
        yield b"".join(line(entity) for entity in page["results"])


def _each_id(ids: list[str]) -> Iterator[str]:
    for entity in ids:
        if entity == STDIN:
            yield from (text.strip() for text in sys.stdin if text.strip())
        else:
            yield entity
