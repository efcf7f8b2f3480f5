"""The settings in the chart's `values.schema.json`, generated from the code. `make docs` updates the file."""

import json
from pathlib import Path
from typing import Any

from tarn.settings import PREFIX, RENAMED, Settings

SCHEMA = Path(__file__).parents[2] / "helm" / "tarn" / "values.schema.json"

SECRET = {
    "TARN_ADMIN_KEY",
    "TARN_BACKUP_OPTIONS",
    "TARN_DATABASE_URL",
    "TARN_FETCH_STORES",
    "TARN_SPARK_SECRET",
    "TARN_STORAGE_OPTIONS",
}
SET_BY_THE_CHART = SECRET | {
    "TARN_ADMIN_KEY_FILE",
    "TARN_HOST",
    "TARN_LAKE_URI",
    "TARN_METRICS_PORT",
    "TARN_PORT",
    "TARN_SHUTDOWN_GRACE",
    "TARN_SPARK_MASTER",
    "TARN_SPARK_MEMORY",
    "TARN_WORKER_METRICS_PORT",
}

# The keywords of JSON Schema that are copied to the chart.
LIMITS = ("type", "enum", "minimum", "maximum", "exclusiveMinimum", "pattern")


def offered() -> dict[str, dict[str, Any]]:
    """Return every setting that the chart does not set itself, with its limits; also by their deprecated names."""
    fields = Settings.model_json_schema()["properties"]
    settings = {PREFIX + name.upper(): _limits(field) for name, field in fields.items()}
    for former, name in RENAMED.items():
        current = PREFIX + name.upper()
        settings[PREFIX + former.upper()] = {"description": f"Deprecated: use {current}.", **settings[current]}
    return {name: limits for name, limits in settings.items() if name not in SET_BY_THE_CHART}


def _limits(field: dict[str, Any]) -> dict[str, Any]:
    schema = next(each for each in field.get("anyOf", [field]) if each["type"] != "null")
    if schema["type"] == "array":
        schema = {**schema, "type": "string"}  # a list is written as one comma-separated variable
    return {key: value for key, value in schema.items() if key in LIMITS}


if __name__ == "__main__":
    schema = json.loads(SCHEMA.read_text())
    schema["properties"]["settings"]["properties"] = offered()
    SCHEMA.write_text(json.dumps(schema, indent=2, ensure_ascii=False) + "\n")
