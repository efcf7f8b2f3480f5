"""What changed between two snapshots."""

from typing import Annotated

import typer

from app.cli.datasets import BASE, Dataset
from app.cli.left_out import LeftOut
from app.cli.options import Out, Quiet
from app.cli.paths import at
from app.cli.session import Session
from app.cli.streams import print_records


def diff(
    session: Session,
    name: Dataset,
    before: Annotated[str, typer.Argument(metavar="A", help="The snapshot before: its id or number, or a ref.")],
    after: Annotated[str, typer.Argument(metavar="B", help="The snapshot after.")],
    out: Out = "-",
    quiet: Quiet = False,
) -> None:
    """Print the entities that differ between two snapshots, a line of JSON each: ADD, MOD or DEL, id and entity.

    Example: tarn diff donations 11 latest | jq -r 'select(.op == "DEL") | .id'
    """
    invalid = LeftOut(name)
    path = at(BASE, name, "snapshots", before, "diff", after, "stream")
    print_records(session, path, {}, out, quiet, left_out=invalid)
    invalid.summarise_shown()
