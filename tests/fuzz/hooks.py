"""Hooks of schemathesis: send requests to the dataset that exists, and keep waits short."""

import re
from typing import Any

import schemathesis
from schemathesis import Case, HookContext

DATASET = "held"
NAME = re.compile(r"[a-z0-9]+(_[a-z0-9]+)*")
SECONDS = re.compile(r"\d+(\.\d+)?", re.ASCII)
MAX_WAIT = 0.01

DATASET_PATH = "/v1/datasets/{dataset}"
"""Requests to this path keep their dataset: a DELETE would remove the one that all other requests need."""


@schemathesis.hook
def before_call(context: HookContext, case: Case, kwargs: dict[str, Any]) -> None:
    """Replace valid dataset names by the existing one, and shorten waits, as no worker is running."""
    dataset = (case.path_parameters or {}).get("dataset")
    if isinstance(dataset, str) and NAME.fullmatch(dataset) and case.operation.path != DATASET_PATH:
        case.path_parameters["dataset"] = DATASET
    wait = str((case.query or {}).get("wait"))
    if SECONDS.fullmatch(wait) and MAX_WAIT < float(wait) <= 300:
        case.query["wait"] = MAX_WAIT
