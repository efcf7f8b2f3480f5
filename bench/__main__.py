"""`make bench`: run every case, or those named, and print what was measured."""

import json
import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import authentication as requests
from bench import crawl, exports, fairness, files, flush, ingest, mapping, reads, soak
from bench import maintenance as maintain
from bench import spark_sql as plain_spark

CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "requests": requests.run,
    "ingest": ingest.run,
    "flush": flush.run,
    "flush_load": flush.run_load,
    "reads": reads.run,
    "fairness": fairness.run,
    "maintain": maintain.run,
    "exports": exports.run,
    "files": files.run,
    "crawl": crawl.run,
    "mapping": mapping.run,
    "soak": soak.run,
    "compacting": soak.run_compaction,
    "plain_spark": plain_spark.run,
}


PARTS = {"flush_load", "soak", "compacting"}
"""Parts of other cases, and what takes minutes whatever is measured: run only when they are named."""


def main(names: list[str]) -> int:
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
