"""The chart's network policies: which connections they allow."""

import copy

import pytest

from tests.ship.chart import CLUSTER, FULL, MINIMAL, Release, release
from tests.ship.network import Pod, reaches

STRANGER = Pod({"app": "other"})
INGRESS = Pod({"app": "proxy"}, namespace="ingress")
PROMETHEUS = Pod({"app": "prometheus"}, namespace="monitoring")
ELSEWHERE = Pod({"app": "other"}, namespace="elsewhere")
DNS = Pod({"k8s-app": "kube-dns"}, namespace="kube-system")
PUBLIC = Pod(namespace=None, address="52.95.110.1")
METADATA = Pod(namespace=None, address="169.254.169.254")
INTRANET = Pod(namespace=None, address="10.0.0.9")
DATABASE = Pod(namespace=None, address="10.20.0.5")
API_SERVER = Pod(namespace=None, address="10.96.0.1")

HTTP, METRICS, DRIVER, BLOCKS = 8000, 9000, 7078, 7079


@pytest.fixture(scope="module")
def cluster() -> Release:
    return release(CLUSTER)


@pytest.mark.parametrize(
    ("source", "target", "port", "allowed"),
    [
        (INGRESS, "api", HTTP, True),
        (STRANGER, "api", HTTP, False),
        (ELSEWHERE, "api", HTTP, False),
        (PROMETHEUS, "api", METRICS, True),
        (INGRESS, "api", METRICS, False),
        (PROMETHEUS, "worker", METRICS, True),
        (STRANGER, "worker", METRICS, False),
        ("executor", "worker", DRIVER, True),
        ("executor", "worker", BLOCKS, True),
        ("api", "worker", DRIVER, False),
        (STRANGER, "worker", DRIVER, False),
        (PROMETHEUS, "worker", DRIVER, False),
        ("worker", "executor", BLOCKS, True),
        ("executor", "executor", BLOCKS, True),
        ("api", "executor", BLOCKS, False),
        (STRANGER, "executor", BLOCKS, False),
        (INGRESS, "migrate", HTTP, False),
        ("executor", "api", HTTP, False),
        ("worker", DNS, 53, True),
        ("api", DATABASE, 5432, True),
        ("executor", DATABASE, 5432, True),
        ("migrate", DATABASE, 5432, True),
        ("api", DATABASE, 22, False),
        ("api", INTRANET, 5432, False),
        ("worker", PUBLIC, 443, True),
        ("executor", PUBLIC, 443, True),
        ("api", PUBLIC, 22, False),
        ("api", INTRANET, 443, False),
        ("api", METADATA, 80, False),
        ("executor", METADATA, 80, False),
        ("worker", API_SERVER, 443, True),
        ("worker", API_SERVER, 6443, True),
        ("api", API_SERVER, 443, False),
        ("executor", API_SERVER, 443, False),
    ],
)
def test_only_the_required_connections_are_allowed(cluster, source, target, port, allowed):
    one, other = (cluster.as_pod(end) if isinstance(end, str) else end for end in (source, target))
    assert reaches(cluster.of("NetworkPolicy"), one, other, port) is allowed


def test_default_policies_allow_requests_to_the_api_only_and_all_egress():
    minimal = release(MINIMAL)
    policies = minimal.of("NetworkPolicy")
    api, worker, migrate = (minimal.as_pod(each) for each in ("api", "worker", "migrate"))
    assert [reaches(policies, STRANGER, end, port) for end, port in ((api, HTTP), (api, METRICS))] == [True, False]
    assert not reaches(policies, STRANGER, worker, METRICS)
    assert not reaches(policies, api, worker, DRIVER)
    assert not reaches(policies, STRANGER, migrate, HTTP)
    assert reaches(policies, api, INTRANET, 5432)


def test_egress_rules_of_the_values_allow_only_the_named_targets():
    full = release(FULL)
    policies = full.of("NetworkPolicy")
    worker = full.as_pod("worker")
    assert reaches(policies, worker, Pod(namespace=None, address="10.9.8.7"), 7077)
    assert not reaches(policies, worker, Pod(namespace=None, address="10.9.8.8"), 7077)
    assert reaches(policies, worker, Pod({"app": "postgres"}), 6432)
    assert not reaches(policies, worker, STRANGER, 6432)


def test_disabled_network_policies_are_not_rendered():
    assert release(MINIMAL, "--set", "networkPolicy.enabled=false").of("NetworkPolicy") == []


@pytest.mark.parametrize(
    ("name", "source", "target", "port"),
    [
        ("lake-tarn-closed", STRANGER, "migrate", HTTP),
        ("lake-tarn-egress", "api", METADATA, 80),
    ],
)
def test_connection_is_allowed_without_the_policy_that_forbids_it(cluster, name, source, target, port):
    """Each policy forbids something, so the tests above can fail."""
    remaining = [each for each in cluster.of("NetworkPolicy") if each["metadata"]["name"] != name]
    assert len(remaining) < len(cluster.of("NetworkPolicy"))
    one, other = (cluster.as_pod(end) if isinstance(end, str) else end for end in (source, target))
    assert reaches(remaining, one, other, port)


def test_connection_is_allowed_by_a_rule_without_peers(cluster):
    opened = copy.deepcopy(cluster.of("NetworkPolicy"))
    (api,) = (each for each in opened if each["metadata"]["name"] == "lake-tarn-api")
    for rule in api["spec"]["ingress"]:
        rule.pop("from")
    assert reaches(opened, STRANGER, cluster.as_pod("api"), METRICS)
