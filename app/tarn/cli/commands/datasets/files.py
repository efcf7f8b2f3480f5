"""Files: put, listed, fetched, removed."""

import json
import os
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from tarn.cli.commands.datasets.datasets import BASE
from tarn.cli.completion import dataset_names
from tarn.cli.failures import Failure, Misuse
from tarn.cli.input.files import STDIN, opened
from tarn.cli.options import IfMatch, IfNoneMatch, Out, Quiet, conditions
from tarn.cli.output.progress import progress
from tarn.cli.output.streams import print_bytes
from tarn.cli.paths import at as path_of
from tarn.cli.session import CommandSession, Yes, client_command

app = typer.Typer(no_args_is_help=True, help="Files: put, listed, fetched, removed.")

CHECKSUM_DIGITS = 64

FETCH_SECONDS = 3600
"""How long the server may take over a fetch."""

Dataset = Annotated[str, typer.Argument(metavar="DATASET", help="The dataset's name.", autocompletion=dataset_names)]
Meta = Annotated[str | None, typer.Option("--meta", metavar="JSON", help="An object that is kept with each file.")]


@client_command(app, "put")
def put(
    session: CommandSession,
    dataset: Dataset,
    sources: Annotated[
        list[str],
        typer.Argument(metavar="FILE...", help="Files, and folders with all below them; - is standard input."),
    ],
    path: Annotated[
        str | None, typer.Option("--path", help="Where the one file came from; its own name if nothing is said.")
    ] = None,
    prefix: Annotated[str, typer.Option("--prefix", metavar="FOLDER", help="What goes before the paths.")] = "",
    origin: Annotated[str | None, typer.Option("--origin", help="Who puts it there.")] = None,
    checksum: Annotated[str | None, typer.Option("--checksum", help="The SHA-256 that the one file must have.")] = None,
    meta: Meta = None,
    entity: Annotated[bool, typer.Option("--entity", help="Write the Document entities, too.")] = False,
    if_match: IfMatch = None,
    if_none_match: IfNoneMatch = None,
    quiet: Quiet = False,
) -> None:
    """Put files into the archive. Each is there when it is listed; the same again changes nothing.

    The entity tags are those of files at the same path: their checksums, or what the server calls their records.

    Example: tarn files put donations ./scans --prefix 2024 --entity

    Example: tarn files put donations report.pdf --meta '{"page": 3}' --if-none-match '*'
    """
    told = _meta(meta)
    found = [*_named(sources, path)]
    if checksum is not None and len(found) > 1:
        raise Misuse("--checksum is for one file")
    params = {"origin": origin, "checksum": checksum, "entity": entity or None}
    params["meta"] = None if told is None else json.dumps(told, ensure_ascii=False, separators=(",", ":"))
    headers = {"Content-Type": "application/octet-stream", **conditions(if_match, if_none_match)}
    done: list[dict[str, Any]] = []
    try:
        for source, own in found:
            below = f"{prefix.rstrip('/')}/{own}" if prefix else own
            done.append(_sent(session, dataset, source, {"path": below, **params}, headers, quiet))
    except Failure:
        if done:
            session.output.note(f"{len(done)} files are put, and the others are not:")
        raise
    session.output.table(done, "path", "size", "mime_type", "checksum")


@client_command(app, "fetch")
def fetch(
    session: CommandSession,
    dataset: Dataset,
    uri: Annotated[str, typer.Argument(metavar="URI", help="What the server is to fetch.")],
    path: Annotated[
        str | None, typer.Option("--path", help="Where it came from; what its source calls it if nothing is said.")
    ] = None,
    origin: Annotated[str | None, typer.Option("--origin", help="Who puts it there.")] = None,
    checksum: Annotated[str | None, typer.Option("--checksum", help="The SHA-256 that it must have.")] = None,
    meta: Meta = None,
    entity: Annotated[bool, typer.Option("--entity", help="Write the Document entity, too.")] = False,
    if_match: IfMatch = None,
    if_none_match: IfNoneMatch = None,
) -> None:
    """Let the server fetch a file from the web, or from a store or a folder that its operator opened.

    Example: tarn files fetch donations https://example.org/report.pdf --entity
    """
    given = {"uri": uri, "path": path, "checksum": checksum, "meta": _meta(meta)}
    body = {name: value for name, value in given.items() if value is not None}
    params = {"origin": origin, "entity": entity or None}
    headers = conditions(if_match, if_none_match)
    session.output.record(
        session.client.document(
            "POST", _path(dataset, "fetch"), body, params=params, headers=headers, wait=FETCH_SECONDS
        )
    )


@client_command(app, "get")
def get(
    session: CommandSession,
    dataset: Dataset,
    name: Annotated[str, typer.Argument(metavar="PATH|CHECKSUM", help="Of a path, what was put there last.")],
    out: Out = "-",
    quiet: Quiet = False,
) -> None:
    """Get a file.

    Example: tarn files get donations scans/1.pdf -o 1.pdf
    """
    file = _newest(session, dataset, name)
    place = _path(dataset, file["checksum"], "data")
    print_bytes(session, place, file["mime_type"], {}, out, quiet, size=file["size"])


@client_command(app, "ls")
def ls(
    session: CommandSession,
    dataset: Dataset,
    prefix: Annotated[str, typer.Argument(metavar="[PREFIX]", help="What paths begin with.")] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many.")] = None,
) -> None:
    """List files by path.

    Example: tarn files ls donations scans/
    """
    listed = session.client.each(_path(dataset), limit, prefix=prefix or None)
    session.output.table(listed, "path", "size", "mime_type", "created", "checksum")


@client_command(app, "rm")
def rm(
    session: CommandSession,
    dataset: Dataset,
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Paths of files; of folders, with -r.")],
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="Everything below these folders.")] = False,
    yes: Yes = False,
) -> None:
    """Remove files. A content that is nowhere else goes with the next vacuum.

    Example: tarn files rm donations scans/1.pdf
    """
    found: list[dict[str, Any]] = []
    for path in paths:
        below = f"{path.rstrip('/')}/" if recursive else None
        here = [*session.client.each(_path(dataset), prefix=below, path=None if recursive else path)]
        if not here:
            raise Misuse(f"there is no file {'below ' if recursive else ''}{path} in {dataset}; nothing was removed")
        found += here
    if recursive:
        session.confirm(f"Remove {len(found)} files of {dataset}?", yes)
    for file in found:
        session.client.request("DELETE", _path(dataset, file["checksum"], file["id"]))
    session.output.record({"files": len(found)})


def _sent(
    session: CommandSession, dataset: str, name: str, params: dict[str, Any], headers: dict[str, str], quiet: bool
) -> dict[str, Any]:
    with opened(name) as source, progress(session.output, params["path"], quiet, size=source.size) as passed:

        def pieces() -> Iterator[bytes]:
            for piece in source.pieces():
                yield piece
                passed(len(piece), 0)

        file: dict[str, Any] = session.client.upload(_path(dataset), pieces(), headers, params, method="PUT").json()
    return file


def _meta(text: str | None) -> dict[str, Any] | None:
    """What is said of files. Raises Misuse for what is no JSON object."""
    if text is None:
        return None
    try:
        told = json.loads(text)
    except ValueError as error:
        raise Misuse(f"--meta is not JSON: {error}") from None
    if not isinstance(told, dict):
        raise Misuse("--meta must be a JSON object, such as '{\"page\": 3}'")
    return told


def _named(sources: list[str], path: str | None) -> Iterator[tuple[str, str]]:
    """Each file, and the path that it gets: a folder's own name is no part of it. Raises Misuse."""
    if path is not None:
        if len(sources) > 1 or os.path.isdir(sources[0]):
            raise Misuse("--path is for one file; --prefix goes before the paths of many")
        yield sources[0], path
        return
    for source in sources:
        if source == STDIN:
            raise Misuse("standard input has no name: give --path")
        if os.path.isdir(source):
            yield from _below(source)
        else:
            yield source, os.path.basename(source)


def _below(folder: str) -> Iterator[tuple[str, str]]:
    for place, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            whole = os.path.join(place, name)
            yield whole, os.path.relpath(whole, folder).replace(os.sep, "/")


def _newest(session: CommandSession, dataset: str, name: str) -> dict[str, Any]:
    if len(name) == CHECKSUM_DIGITS and set(name) <= set("0123456789abcdef"):
        return next(session.client.each(_path(dataset, name), 1))
    found = [*session.client.each(_path(dataset), path=name)]
    if not found:
        raise Misuse(f"there is no file {name} in {dataset}")
    return max(found, key=lambda file: str(file["created"]))


def _path(dataset: str, *below: str) -> str:
    return path_of(BASE, dataset, "files", *below)
