"""Distribution of tests: those that share an expensive fixture, such as Spark or a server, run in one process."""

import pytest


@pytest.mark.xdist_group("groups")
def test_xdist_groups_are_applied_when_tests_are_distributed(request: pytest.FixtureRequest):
    """Check that pytest-xdist is loaded: without it, pytest ignores groups silently."""
    is_distributed = getattr(request.config.option, "loadgroup", False)

    assert request.node.nodeid.endswith("@groups") is is_distributed
