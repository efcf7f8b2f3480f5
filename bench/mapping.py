"""Benchmark of mappings: turn the rows of a CSV file into entities, compared with FtM's own tool on the same file."""

import csv
import hashlib
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.clients import QUIET
from bench.maintenance import BenchDataset
from tests.server import running

ROWS = int(os.environ.get("MAPPING_ROWS", "1000000"))
WARM_UP_ROWS = 10_000
"""Rows of the warm-up file: enough for a task on each core, because only an executor that has mapped before is warm."""
SPEED_TARGET = 5.0
COUNTRIES = ["de", "gb", "fr", "us", "cy", "vg", "pa", "Germany", "France", "Greece"]
KINDS = ["Holding", "Trade", "Shipping", "Media", "Relief"]
NAMES = ["Ada", "Bo", "Carl", "Dina", "Eve", "Finn", "Gia", "Hugo"]
FAMILIES = ["Meyer", "Ortega", "O'Hara", "Lindqvist", "Ivanov", "Müller"]
COLUMNS = ["number", "company", "land", "founded", "address", "owner", "name", "born", "share", "since"]

MAPPING = {
    "entities": {
        "company": {
            "schema": "Company",
            "key": "number",
            "key_literal": "company",
            "properties": {
                "name": {"column": "company"},
                "registrationNumber": {"column": "number"},
                "jurisdiction": {"column": "land"},
                "incorporationDate": {"column": "founded"},
                "address": {"column": "address"},
            },
        },
        "owner": {
            "schema": "Person",
            "key": "owner",
            "key_literal": "person",
            "properties": {"name": {"column": "name"}, "birthDate": {"column": "born"}},
        },
        "owning": {
            "schema": "Ownership",
            "keys": ["number", "owner"],
            "key_literal": "owning",
            "properties": {
                "owner": {"entity": "owner"},
                "asset": {"entity": "company"},
                "percentage": {"column": "share"},
                "startDate": {"column": "since"},
            },
        },
    }
}


def run() -> dict[str, Any]:
    """Measure on SQLite and a local disk, on warm Spark: until all entities are visible, and until they are flushed."""
    results: dict[str, Any] = {"rows": ROWS}
    with tempfile.TemporaryDirectory() as name:
        path = _written(ROWS, Path(name) / "data.csv")
        results["MB"] = path.stat().st_size / 1e6
        results["ftm map-csv s"] = _ftm(path)
        home = Path(name) / "home"
        home.mkdir()
        with running(home, "serve", **QUIET) as server:
            store = BenchDataset(server, "big")
            warm = _archived(home, "big", _written(WARM_UP_ROWS, Path(name) / "warm.csv"))
            for content_hash in (warm, _archived(home, "big", path)):
                results["ours s"], result = store.map(content_hash, MAPPING)
            results["statements"] = result["statements"]
            results["flush s"], _ = store.operate("flush")
    results["ftm map-csv / ours"] = results["ftm map-csv s"] / results["ours s"]
    results["met"] = results["ftm map-csv / ours"] >= SPEED_TARGET
    return results


def _ftm(path: Path) -> float:
    """Run `ftm map-csv` with its output discarded; return the seconds."""
    mapping = path.with_name("mapping.yml")
    mapping.write_text(str({"big": {"queries": [MAPPING]}}))
    tool = Path(sys.executable).parent / "ftm"
    start = time.perf_counter()
    subprocess.run([tool, "map-csv", "-i", path, "-o", "/dev/null", mapping], check=True, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def _archived(home: Path, dataset: str, path: Path) -> str:
    """Copy the file to its path in the archive; return its checksum."""
    data = path.read_bytes()
    checksum = hashlib.sha256(data).hexdigest()
    folder = home / "data/lake" / dataset / "archive" / checksum[0:2] / checksum[2:4] / checksum[4:6] / checksum
    folder.mkdir(parents=True)
    (folder / "data").write_bytes(data)
    return checksum


def _written(count: int, path: Path) -> Path:
    draw = random.Random(7)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for number in range(count):
            owner = draw.randrange(count)
            company = f"{draw.choice(KINDS)} {draw.choice(FAMILIES)} {number} Ltd."
            founded = f"{draw.randint(1950, 2020)}-{draw.randint(1, 12):02d}-{draw.randint(1, 28):02d}"
            address = f"{draw.randint(1, 400)} High Street, Town {draw.randint(1, 5000)}"
            person = f"{NAMES[owner % len(NAMES)]} {FAMILIES[owner % len(FAMILIES)]} {owner}"
            born, share, since = str(1930 + owner % 70), f"{draw.randint(1, 100)}%", str(draw.randint(1990, 2023))
            row = [f"C{number:08d}", company, draw.choice(COUNTRIES), founded, address]
            writer.writerow([*row, f"P{owner:08d}", person, born, share, since])
    return path
