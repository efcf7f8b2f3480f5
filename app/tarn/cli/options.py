"""Options that several commands of data have."""

from typing import Annotated, Literal

import typer

Ids = Annotated[list[str] | None, typer.Option("--id", help="Entity ids, canonical ids or referents; repeatable.")]
Schema = Annotated[list[str] | None, typer.Option("--schema", help="Schemata, exactly; repeatable.")]
Schemata = Annotated[
    list[str] | None, typer.Option("--schemata", help="Schemata and all that are one of them; repeatable.")
]
Origins = Annotated[list[str] | None, typer.Option("--origin", help="Who says something of it; repeatable.")]
Origin = Annotated[str | None, typer.Option("--origin", help="Who says it; `default` if nothing else does.")]
OneOrigin = Annotated[str | None, typer.Option("--origin", help="Only what this origin says.")]

At = Annotated[
    str | None,
    typer.Option("--at", metavar="STATE", help="Read a snapshot: its id or number, a ref, or a moment (2030-01-31)."),
]
Fresh = Annotated[
    Literal["overlay", "flush", "snapshot"] | None,
    typer.Option(
        "--fresh",
        help="overlay: all that was acknowledged, as is read without this option; flush: the same after a flush; "
        "snapshot: the latest snapshot alone.",
    ),
]
Commit = Annotated[
    Literal["auto", "wait_for", "force"],
    typer.Option(
        "--commit", help="auto: done when it is durable; wait_for: when a snapshot holds it; force: flush for that."
    ),
]
OnError = Annotated[
    Literal["abort", "skip", "drop"],
    typer.Option(
        "--on-error",
        help="abort: refuse everything for one bad record; skip: leave that record out; drop: leave out only the "
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

Source = Annotated[
    str, typer.Argument(metavar="FILE", help="- is standard input. What is compressed with gzip or zstd is sent so.")
]
Out = Annotated[
    str,
    typer.Option(
        "--out", "-o", metavar="FILE", help="Where to, - for standard output. A file is there when it is whole."
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]

IfMatch = Annotated[
    str | None, typer.Option("--if-match", metavar="ETAG", help="Fail unless what this tag stands for is still there.")
]
IfNoneMatch = Annotated[
    str | None,
    typer.Option("--if-none-match", metavar="ETAG", help="Fail if it is there already; '*': if anything is."),
]


def conditions(if_match: str | None, if_none_match: str | None = None) -> dict[str, str]:
    """The headers of a request that must find what its caller knows."""
    given = {"If-Match": if_match, "If-None-Match": if_none_match}
    return {name: _quoted(tag) for name, tag in given.items() if tag is not None}


def _quoted(tag: str) -> str:
    """An entity tag as HTTP wants it; shells take its quotes away."""
    return tag if tag == "*" or tag.endswith('"') else f'"{tag}"'
