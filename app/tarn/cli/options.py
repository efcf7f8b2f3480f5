"""Options shared by several data commands."""

from typing import Annotated, Literal

import typer

from tarn.cli.completion import dataset_names

Dataset = Annotated[str, typer.Argument(metavar="DATASET", help="The dataset's name.", autocompletion=dataset_names)]
Ids = Annotated[list[str] | None, typer.Option("--id", help="Entity ids, canonical ids or referents; repeatable.")]
Schema = Annotated[list[str] | None, typer.Option("--schema", help="Schemata, exactly; repeatable.")]
Schemata = Annotated[list[str] | None, typer.Option("--schemata", help="Schemata and their descendants; repeatable.")]
Origins = Annotated[list[str] | None, typer.Option("--origin", help="Origins of the statements; repeatable.")]
Origin = Annotated[str | None, typer.Option("--origin", help="Origin of the statements; `default` if none is given.")]
OneOrigin = Annotated[str | None, typer.Option("--origin", help="Only statements of this origin.")]

At = Annotated[
    str | None,
    typer.Option("--at", metavar="STATE", help="Read a snapshot: its id or number, a ref, or a time (2030-01-31)."),
]
Fresh = Annotated[
    Literal["overlay", "flush", "snapshot"] | None,
    typer.Option(
        "--fresh",
        help="overlay (default): every acknowledged write; flush: the same, after a flush; "
        "snapshot: only the latest snapshot.",
    ),
]
Commit = Annotated[
    Literal["auto", "wait_for", "force"],
    typer.Option(
        "--commit",
        help="Return when the data is durable (auto), when a snapshot has it (wait_for), or after a flush (force).",
    ),
]
OnError = Annotated[
    Literal["abort", "skip", "drop"],
    typer.Option(
        "--on-error",
        help="abort: refuse everything if a record is invalid; skip: leave that record out; drop: leave out only the "
        "property or value that cannot be stored.",
    ),
]
Values = Annotated[
    Literal["clean", "as_is"] | None,
    typer.Option(
        "--values",
        help="clean: clean values as FollowTheMoney does and list those it rejects; as_is: store them as they are.",
    ),
]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse everything if any value would be left out.")]

InputPath = Annotated[
    str,
    typer.Argument(
        metavar="FILE", help="File to send, - for standard input. gzip and zstd are recognised and sent as they are."
    ),
]
Out = Annotated[
    str,
    typer.Option(
        "--out", "-o", metavar="FILE", help="Output file, - for standard output. A file appears when it is complete."
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]

IfMatch = Annotated[
    str | None, typer.Option("--if-match", metavar="ETAG", help="Fail unless the current entity tag is this one.")
]
IfNoneMatch = Annotated[
    str | None,
    typer.Option(
        "--if-none-match", metavar="ETAG", help="Fail if the current entity tag is this one; '*': if it exists at all."
    ),
]


def conditions(if_match: str | None, if_none_match: str | None = None) -> dict[str, str]:
    """Return the headers of a conditional request."""
    headers = {"If-Match": if_match, "If-None-Match": if_none_match}
    return {name: _quoted(tag) for name, tag in headers.items() if tag is not None}


def _quoted(tag: str) -> str:
    """Return an entity tag in quotes, as HTTP needs it; shells strip them."""
    return tag if tag == "*" or tag.endswith('"') else f'"{tag}"'
