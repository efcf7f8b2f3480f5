"""What the fuzzer is told besides the OpenAPI document: where there is something to find, and not to wait."""

import re
from typing import Any

import schemathesis
from schemathesis import Case, HookContext

DATASET = "held"
NAME = re.compile(r"[a-z0-9]+(_[a-z0-9]+)*")
SECONDS = re.compile(r"\d+(\.\d+)?", re.ASCII)
LONGEST_WAIT = 0.01

ITSELF = "/v1/datasets/{dataset}"
"""Where the dataset could be deleted that all others need."""


@schemathesis.hook
def before_call(context: HookContext, case: Case, kwargs: dict[str, Any]) -> None:
    """A dataset that could be there is the one that is; and no worker works here, so that to wait is in vain."""
    dataset = (case.path_parameters or {}).get("dataset")
    if isinstance(dataset, str) and NAME.fullmatch(dataset) and case.operation.path != ITSELF:
        case.path_parameters["dataset"] = DATASET
    wait = str((case.query or {}).get("wait"))
    if SECONDS.fullmatch(wait) and LONGEST_WAIT < float(wait) <= 300:
        case.query["wait"] = LONGEST_WAIT
