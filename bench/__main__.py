"""`make bench`: run all benchmarks, or the named ones, and print the results."""

import json
import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import (
    authentication,
    client_latency,
    crawl,
    exports,
    fairness,
    files,
    flush,
    ingest,
    maintenance,
    mapping,
    reads,
    soak,
    spark_sql,
)

CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "client_latency": client_latency.run,
    "authentication": authentication.run,
    "ingest": ingest.run,
    "flush": flush.run,
    "flush_load": flush.run_load,
    "reads": reads.run,
    "fairness": fairness.run,
    "maintenance": maintenance.run,
    "exports": exports.run,
    "files": files.run,
    "crawl": crawl.run,
    "mapping": mapping.run,
    "soak": soak.run,
    "soak_compaction": soak.run_compaction,
    "spark_sql": spark_sql.run,
}


PARTS = {"flush_load", "soak", "soak_compaction"}
"""Cases that are part of another case, or that run for minutes: run only when named."""


def main(names: list[str]) -> int:
    """Run the named cases, print the results, and return 1 if a target was missed."""
    results = {name: CASES[name]() for name in names or [case for case in CASES if case not in PARTS]}
    print(json.dumps(results, indent=2))
    table = Table("case", "measure", "value")
    for case, measures in results.items():
        for measure, value in measures.items():
            table.add_row(case, measure, f"{value:,.2f}" if isinstance(value, float) else str(value))
    Console().print(table)
    failed = [case for case, measures in results.items() if measures.get("met") is False]
    if failed:
        print(f"target missed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
