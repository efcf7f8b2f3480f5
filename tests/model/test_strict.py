"""Request bodies: values must have their JSON type."""

from typing import Any

import pytest
from pydantic import ValidationError
from tarn.model.datasets.dataset import Policy
from tarn.model.datasets.ref import NewRef
from tarn.model.datasets.stage import StageCommit
from tarn.model.tenant import NewGrant, NewKey, NewLimits, Strict
from tarn.model.work.job import CompactOptions, PurgeOptions, VacuumOptions


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (CompactOptions, {"force": "yes"}),
        (CompactOptions, {"force": 1}),
        (NewLimits, {"rate_burst": True}),
        (NewLimits, {"rate_burst": "5"}),
        (NewLimits, {"rate_limit": "0.5"}),
        (NewKey, {"expires": 1_900_000_000}),
        (NewKey, {"expires": "soon"}),
        (Policy, {"exports": "5"}),
        (Policy, {"exports": True}),
        (PurgeOptions, {"entity_ids": ["a"], "confirm": 1}),
        (VacuumOptions, {"retention_hours": "48"}),
        (NewRef, {"snapshot": "a\x00"}),
        (StageCommit, {"stages": ["a\x00"]}),
    ],
)
def test_value_of_another_type_or_that_databases_cannot_store_is_refused(model: type[Strict], body: dict[str, Any]):
    with pytest.raises(ValidationError):
        model.model_validate(body)


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (CompactOptions, {"force": True}),
        (NewLimits, {"rate_burst": 5.0, "rate_limit": 1, "quota_bytes": None}),
        (NewKey, {"expires": "2030-01-01T00:00:00Z"}),
        (NewGrant, {"dataset": "a*", "level": "read"}),
        (Policy, {"exports": 5}),
        (Policy, {"exports": "after_flush"}),
    ],
)
def test_value_of_the_declared_type_is_accepted(model: type[Strict], body: dict[str, Any]):
    assert model.model_validate(body).model_fields_set == body.keys()
