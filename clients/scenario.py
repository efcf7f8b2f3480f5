"""Test scenario for the generated Python client: create a dataset, write, flush, read back, export; print the results.

`typescript/scenario.ts` does the same with the TypeScript client.
"""

import io
import json
import sys
from typing import TypeVar

from tarn_generated.api.datasets import create_dataset
from tarn_generated.api.entities import add_entities, get_entity, stream_entities
from tarn_generated.api.exports import get_export
from tarn_generated.api.jobs import get_job
from tarn_generated.api.operations import export_dataset, flush_dataset
from tarn_generated.client import AuthenticatedClient
from tarn_generated.models import (
    Entity,
    EntityNotFoundProblem,
    ExportKind,
    ExportOptions,
    GetEntityFreshType0,
    Job,
    NewDataset,
    Written,
)
from tarn_generated.types import File

Answer = TypeVar("Answer")


def done(answer: object, kind: type[Answer]) -> Answer:
    """Return the result of a call if it has this type. Raises TypeError for a problem."""
    if not isinstance(answer, kind):
        raise TypeError(answer)
    return answer


def over(client: AuthenticatedClient, answer: object) -> Job:
    """Wait for a job and return it: the first flush of a server starts Spark, which may take longer than one wait."""
    job = done(answer, Job)
    while job.finished is None:
        job = done(get_job.sync(job.id, client=client, wait=60), Job)
    return job


def lines(answer: object) -> int:
    """Return the number of lines of a file."""
    return len(done(answer, File).payload.read().splitlines())


def main(url: str, key: str, name: str) -> None:
    """Run the scenario on a new dataset of this name."""
    people = [{"id": one, "schema": "Person", "properties": {"name": [f"{one} Doe"]}} for one in ("jane", "joe")]
    body = io.BytesIO("\n".join(json.dumps(person) for person in people).encode())
    with AuthenticatedClient(base_url=url, token=key, timeout=None) as client:
        create_dataset.sync(client=client, body=NewDataset(name=name, title="Made by Python"))
        written = done(
            add_entities.sync(name, client=client, body=File(payload=body), origin="python"),
            Written,
        )
        flushed = over(client, flush_dataset.sync(name, client=client, wait=60))
        fresh = GetEntityFreshType0.SNAPSHOT
        jane = done(get_entity.sync(name, "jane", client=client, fresh=fresh), Entity)
        missing = done(get_entity.sync(name, "nobody", client=client), EntityNotFoundProblem)
        streamed = lines(stream_entities.sync(name, client=client))
        options = ExportOptions(kinds=[ExportKind.ENTITIES])
        made = over(client, export_dataset.sync(name, client=client, body=options, wait=60))
        exported = lines(get_export.sync(name, "entities.ftm.json", client=client))
    results = {
        "written": [written.entities, written.statements],
        "flushed": flushed.state,
        "caption": jane.caption,
        "missing": [missing.status, missing.type_.rsplit("/", 1)[-1]],
        "streamed": streamed,
        "made": made.state,
        "exported": exported,
    }
    sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
