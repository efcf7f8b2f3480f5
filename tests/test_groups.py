"""Tests that share what is dear to start, a Spark or a server, run in one process."""

import pytest


@pytest.mark.xdist_group("groups")
def test_tests_are_grouped_wherever_they_are_distributed(request: pytest.FixtureRequest):
    """A pytest that pytest-xdist does not know yet ignores every group, without a word."""
    is_distributed = getattr(request.config.option, "loadgroup", False)

    assert request.node.nodeid.endswith("@groups") is is_distributed
