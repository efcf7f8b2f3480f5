"""Test data for benchmarks: scaled-up shared samples if available, otherwise generated entities of similar shape."""

import random
import subprocess
import sys
from pathlib import Path

import orjson

SHARED = Path(__file__).parents[2] / "shared" / "scale.py"
COUNTRIES = ["de", "fr", "gb", "us", "gr", "pl", "it", "es"]
WORDS = ["Harbour", "Council", "North", "Relief", "Trust", "Union", "Media", "Fund", "River", "House"]


def entities(count: int, folder: Path) -> Path:
    """Write a file of this many entities, one per line, with about six statements each; return its path."""
    path = folder / f"entities-{count}.json"
    if SHARED.exists():
        subprocess.run([sys.executable, SHARED, str(count), path], check=True, stdout=subprocess.DEVNULL)
        return path
    draw = random.Random(7)
    with path.open("wb") as file:
        for number in range(count):
            file.write(orjson.dumps(_organization(number, draw)) + b"\n")
    return path


def _organization(number: int, draw: random.Random) -> dict[str, object]:
    name = " ".join(draw.choices(WORDS, k=3))
    return {
        "id": f"org-{number}",
        "schema": "Organization",
        "properties": {
            "name": [f"{name} {number}"],
            "country": [draw.choice(COUNTRIES)],
            "incorporationDate": [f"{draw.randint(1950, 2020)}-{draw.randint(1, 12):02d}-01"],
            "website": [f"https://example.org/{draw.randint(1, 5000)}"],
            "notes": [f"{name} works along the {draw.choice(WORDS)} since long, note {number}"],
        },
    }
