"""Load a manifest with yente's own code, without a search index; runs in yente's environment, not in Tarn's.

Arguments: the manifest, and as JSON the loaded version of each dataset. Prints one JSON document: for each dataset,
what yente decides and the operations that it would index.
"""

import asyncio
import json
import sys
from typing import Any

from yente.data.manifest import Catalog, Manifest
from yente.data.updater import DatasetUpdater
from yente.search.indexer import iter_entity_docs


async def main(manifest: str, loaded: dict[str, str]) -> dict[str, Any]:
    catalog = await Catalog.load(await Manifest.load(manifest))
    results = {}
    for dataset in catalog.datasets:
        updater = await DatasetUpdater.build(dataset, loaded.get(dataset.name))
        needed = updater.needs_update()
        results[dataset.name] = {
            "model": dataset.model.model_dump(mode="json"),
            "checksum": dataset.model.entities_checksum,
            "needs_update": needed,
            "is_incremental": updater.is_incremental,
            "target_version": updater.target_version,
            "operations": [operation async for operation in updater.load()] if needed else [],
            "documents": [document async for document in iter_entity_docs(updater, "index")] if needed else [],
        }
    return results


if __name__ == "__main__":
    json.dump(asyncio.run(main(sys.argv[1], json.loads(sys.argv[2]))), sys.stdout)
