"""What changed between two snapshots."""

from typing import Annotated

import typer

from tarn.cli.commands.datasets.datasets import BASE, Dataset
from tarn.cli.options import Out, Quiet
from tarn.cli.output.invalid_entities import OmittedEntities
from tarn.cli.output.streams import print_records
from tarn.cli.paths import at
from tarn.cli.session import CommandSession


def diff(
    session: CommandSession,
    name: Dataset,
    before: Annotated[str, typer.Argument(metavar="A", help="The snapshot before: its id or number, or a ref.")],
    after: Annotated[str, typer.Argument(metavar="B", help="The snapshot after.")],
    out: Out = "-",
    quiet: Quiet = False,
) -> None:
    """Print the entities that differ between two snapshots, a line of JSON each: ADD, MOD or DEL, id and entity.

    Example: tarn diff donations 11 latest | jq -r 'select(.op == "DEL") | .id'
    """
    invalid = OmittedEntities(name)
    path = at(BASE, name, "snapshots", before, "diff", after, "stream")
    print_records(session, path, {}, out, quiet, left_out=invalid)
    invalid.summarise_shown()
