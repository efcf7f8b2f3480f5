"""`tarn files`: upload, fetch, download, list and delete archived files."""

import json
import os
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from tarn_client.paths import path_of

from tarn.cli.completion import dataset_names
from tarn.cli.connection import DATASETS, LONG_TIMEOUT, TIMEOUT
from tarn.cli.failures import FAILURES, Misuse
from tarn.cli.input.files import STDIN, open_input
from tarn.cli.options import IfMatch, IfNoneMatch, Out, Quiet, conditions
from tarn.cli.output.progress import progress
from tarn.cli.output.streams import print_bytes
from tarn.cli.session import CommandSession, Yes, client_command

app = typer.Typer(no_args_is_help=True, help="Upload, fetch, download, list and delete files of the archive.")

CHECKSUM_DIGITS = 64

FETCH_SECONDS = 3600
"""Maximum seconds that the server takes for a fetch."""

Dataset = Annotated[str, typer.Argument(metavar="DATASET", help="The dataset's name.", autocompletion=dataset_names)]
Meta = Annotated[str | None, typer.Option("--meta", metavar="JSON", help="JSON object stored with each file.")]


@client_command(app, "put")
def put(
    session: CommandSession,
    dataset: Dataset,
    sources: Annotated[
        list[str],
        typer.Argument(metavar="FILE...", help="Files, or folders (recursively); - is standard input."),
    ],
    path: Annotated[
        str | None, typer.Option("--path", help="Path of a single file in the archive; default: its name.")
    ] = None,
    prefix: Annotated[str, typer.Option("--prefix", metavar="FOLDER", help="Folder prepended to the paths.")] = "",
    origin: Annotated[str | None, typer.Option("--origin", help="Origin of the files.")] = None,
    checksum: Annotated[str | None, typer.Option("--checksum", help="Expected SHA-256 of a single file.")] = None,
    meta: Meta = None,
    entity: Annotated[bool, typer.Option("--entity", help="Write Document entities for the files, too.")] = False,
    if_match: IfMatch = None,
    if_none_match: IfNoneMatch = None,
    quiet: Quiet = False,
) -> None:
    """Upload files to the archive. Each file listed is stored; uploading it again changes nothing.

    Entity tags refer to the file at the same path: its checksum, or the ETag that the server returned for it.

    Example: tarn files put donations ./scans --prefix 2024 --entity

    Example: tarn files put donations report.pdf --meta '{"page": 3}' --if-none-match '*'
    """
    metadata = _meta(meta)
    files = [*_named(sources, path)]
    if checksum is not None and len(files) > 1:
        raise Misuse("--checksum is for one file")
    params = {"origin": origin, "checksum": checksum, "entity": entity or None}
    params["meta"] = None if metadata is None else json.dumps(metadata, ensure_ascii=False, separators=(",", ":"))
    headers = {"Content-Type": "application/octet-stream", **conditions(if_match, if_none_match)}
    done: list[dict[str, Any]] = []
    try:
        for source, relative_path in files:
            below = f"{prefix.rstrip('/')}/{relative_path}" if prefix else relative_path
            done.append(_sent(session, dataset, source, {"path": below, **params}, headers, quiet))
    except FAILURES:
        if done:
            session.output.note(f"{len(done)} files were uploaded; the others were not:")
        raise
    session.output.table(done, "path", "size", "mime_type", "checksum")


@client_command(app, "fetch")
def fetch(
    session: CommandSession,
    dataset: Dataset,
    uri: Annotated[str, typer.Argument(metavar="URI", help="URI of the file that the server fetches.")],
    path: Annotated[
        str | None, typer.Option("--path", help="Path of the file in the archive; default: its name at the source.")
    ] = None,
    origin: Annotated[str | None, typer.Option("--origin", help="Origin of the files.")] = None,
    checksum: Annotated[str | None, typer.Option("--checksum", help="Expected SHA-256 of the file.")] = None,
    meta: Meta = None,
    entity: Annotated[bool, typer.Option("--entity", help="Write a Document entity for the file, too.")] = False,
    if_match: IfMatch = None,
    if_none_match: IfNoneMatch = None,
) -> None:
    """Let the server fetch a file from the web, or from a store or folder allowed by its settings.

    Example: tarn files fetch donations https://example.org/report.pdf --entity
    """
    request_body = {"uri": uri, "path": path, "checksum": checksum, "meta": _meta(meta)}
    body = {name: value for name, value in request_body.items() if value is not None}
    params = {"origin": origin, "entity": entity or None}
    headers = conditions(if_match, if_none_match)
    session.output.record(
        session.connection.write(
            "POST", _path(dataset, "fetch"), body, params=params, headers=headers, timeout=TIMEOUT + FETCH_SECONDS
        )
    )


@client_command(app, "get")
def get(
    session: CommandSession,
    dataset: Dataset,
    name: Annotated[
        str, typer.Argument(metavar="PATH|CHECKSUM", help="A path (the file uploaded there last) or a SHA-256.")
    ],
    out: Out = "-",
    quiet: Quiet = False,
) -> None:
    """Download a file.

    Example: tarn files get donations scans/1.pdf -o 1.pdf
    """
    file = _newest(session, dataset, name)
    data_path = _path(dataset, file["checksum"], "data")
    print_bytes(session, data_path, file["mime_type"], {}, out, quiet, size=file["size"])


@client_command(app, "ls")
def ls(
    session: CommandSession,
    dataset: Dataset,
    prefix: Annotated[str, typer.Argument(metavar="[PREFIX]", help="Only paths with this prefix.")] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of files.")] = None,
) -> None:
    """List files by path.

    Example: tarn files ls donations scans/
    """
    listed = session.connection.each(_path(dataset), {"prefix": prefix or None}, limit)
    session.output.table(listed, "path", "size", "mime_type", "created", "checksum")


@client_command(app, "rm")
def rm(
    session: CommandSession,
    dataset: Dataset,
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Paths of files, or of folders with -r.")],
    recursive: Annotated[
        bool, typer.Option("--recursive", "-r", help="Delete everything below these folders.")
    ] = False,
    yes: Yes = False,
) -> None:
    """Delete files. Content that no other file has is deleted by the next vacuum.

    Example: tarn files rm donations scans/1.pdf
    """
    files: list[dict[str, Any]] = []
    for path in paths:
        below = f"{path.rstrip('/')}/" if recursive else None
        here = [*session.connection.each(_path(dataset), {"prefix": below, "path": None if recursive else path})]
        if not here:
            raise Misuse(f"there is no file {'below ' if recursive else ''}{path} in {dataset}; nothing was deleted")
        files += here
    if recursive:
        session.confirm(f"Delete {len(files)} files of {dataset}?", yes)
    for file in files:
        session.connection.write("DELETE", _path(dataset, file["checksum"], file["id"]))
    session.output.record({"files": len(files)})


def _sent(
    session: CommandSession, dataset: str, name: str, params: dict[str, Any], headers: dict[str, str], quiet: bool
) -> dict[str, Any]:
    with open_input(name) as source, progress(session.output, params["path"], quiet, size=source.size) as advance:

        def pieces() -> Iterator[bytes]:
            for piece in source.pieces():
                yield piece
                advance(len(piece), 0)

        return session.connection.write(
            "PUT", _path(dataset), params=params, content=pieces, headers=headers, timeout=LONG_TIMEOUT
        )


def _meta(text: str | None) -> dict[str, Any] | None:
    """Return the metadata of --meta. Raises Misuse if it is not a JSON object."""
    if text is None:
        return None
    try:
        metadata = json.loads(text)
    except ValueError as error:
        raise Misuse(f"--meta is not JSON: {error}") from None
    if not isinstance(metadata, dict):
        raise Misuse("--meta must be a JSON object, such as '{\"page\": 3}'")
    return metadata


def _named(sources: list[str], path: str | None) -> Iterator[tuple[str, str]]:
    """Yield each file and its path in the archive, without the folder's own name. Raises Misuse."""
    if path is not None:
        if len(sources) > 1 or os.path.isdir(sources[0]):
            raise Misuse("--path is for one file; use --prefix for several")
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
    for directory, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            file = os.path.join(directory, name)
            yield file, os.path.relpath(file, folder).replace(os.sep, "/")


def _newest(session: CommandSession, dataset: str, name: str) -> dict[str, Any]:
    if len(name) == CHECKSUM_DIGITS and set(name) <= set("0123456789abcdef"):
        return next(session.connection.each(_path(dataset, name), limit=1))
    files = [*session.connection.each(_path(dataset), {"path": name})]
    if not files:
        raise Misuse(f"there is no file {name} in {dataset}")
    return max(files, key=lambda file: str(file["created"]))


def _path(dataset: str, *below: str) -> str:
    return path_of(DATASETS, dataset, "files", *below)
