"""Evaluation of network policies as in Kubernetes: a pod that no policy of a direction selects accepts everything, and
one that policies select accepts what any of their rules allows.
"""

from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Any


@dataclass(frozen=True)
class Pod:
    """One end of a connection. An address outside the cluster has neither labels nor a namespace."""

    labels: dict[str, str] = field(default_factory=dict)
    namespace: str | None = "default"
    ports: dict[str, int] = field(default_factory=dict)
    address: str = "10.1.2.3"


def reaches(policies: list[dict[str, Any]], source: Pod, target: Pod, port: int, protocol: str = "TCP") -> bool:
    """Return whether a connection is allowed. `policies` are those of the namespace `default`."""
    return _allows(policies, "Ingress", target, source, target, port, protocol) and _allows(
        policies, "Egress", source, target, target, port, protocol
    )


def _allows(
    policies: list[dict[str, Any]], direction: str, pod: Pod, other: Pod, target: Pod, port: int, protocol: str
) -> bool:
    if pod.namespace != "default":
        return True
    specs = [policy["spec"] for policy in policies]
    own = [spec for spec in specs if direction in spec["policyTypes"] and _selects(spec["podSelector"], pod.labels)]
    peers = "from" if direction == "Ingress" else "to"
    rules = [rule for spec in own for rule in spec.get(direction.lower(), [])]
    return not own or any(
        _is_peer(rule.get(peers), other) and _is_port(rule.get("ports"), target, port, protocol) for rule in rules
    )


def _is_peer(peers: list[dict[str, Any]] | None, other: Pod) -> bool:
    return not peers or any(_matches(peer, other) for peer in peers)


def _matches(peer: dict[str, Any], other: Pod) -> bool:
    if "ipBlock" in peer:
        address = ip_address(other.address)
        within = address in ip_network(peer["ipBlock"]["cidr"])
        return within and not any(address in ip_network(each) for each in peer["ipBlock"].get("except", []))
    if other.namespace is None:
        return False
    named = {"kubernetes.io/metadata.name": other.namespace}
    near = _selects(peer["namespaceSelector"], named) if "namespaceSelector" in peer else other.namespace == "default"
    return near and _selects(peer.get("podSelector", {}), other.labels)


def _is_port(ports: list[dict[str, Any]] | None, target: Pod, port: int, protocol: str) -> bool:
    return not ports or any(
        target.ports.get(each["port"], each["port"]) == port and each.get("protocol", "TCP") == protocol
        for each in ports
    )


def _selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    def matches(expression: dict[str, Any]) -> bool:
        assert expression["operator"] == "In"
        return labels.get(expression["key"]) in expression["values"]

    match_labels = selector.get("matchLabels", {})
    return match_labels.items() <= labels.items() and all(map(matches, selector.get("matchExpressions", [])))
