"""`tarn diff`: print the entities that differ between two snapshots."""

from typing import Annotated

import typer
from tarn_client.paths import path_of

from tarn.cli.commands.datasets.datasets import Dataset
from tarn.cli.connection import DATASETS
from tarn.cli.options import Out, Quiet
from tarn.cli.output.invalid_entities import OmittedEntities
from tarn.cli.output.streams import print_records
from tarn.cli.session import CommandSession


def diff(
    session: CommandSession,
    name: Dataset,
    before: Annotated[str, typer.Argument(metavar="A", help="The older snapshot: its id or number, or a ref.")],
    after: Annotated[str, typer.Argument(metavar="B", help="The newer snapshot: its id or number, or a ref.")],
    out: Out = "-",
    quiet: Quiet = False,
) -> None:
    """Print the entities that differ between two snapshots, one JSON line each: ADD, MOD or DEL, id and entity.

    Example: tarn diff donations 11 latest | jq -r 'select(.op == "DEL") | .id'
    """
    invalid = OmittedEntities(name)
    path = path_of(DATASETS, name, "snapshots", before, "diff", after, "stream")
    print_records(session, path, {}, out, quiet, omitted=invalid)
    invalid.summarise_shown()
