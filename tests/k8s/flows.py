"""Whether network policies allow a connection, at its source and at its destination."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.k8s.objects import Object, namespace, of_kind, selected, selects

NAME = "app.kubernetes.io/name"


@dataclass(frozen=True)
class End:
    """One end of a connection. namespace: "" for an address outside of the cluster."""

    namespace: str = ""
    labels: Mapping[str, str] | None = None


ENDS = {
    "any address": End(),
    "DNS": End("kube-system", {}),
    "admin": End("impetus", {"impetus/admin": "true"}),
    "probes": End("impetus", {"impetus/probes": "true"}),
    "ingress": End("ingress", {}),
    "prometheus": End("monitoring", {NAME: "prometheus"}),
    "collector": End("observability", {}),
    "fl-server": End("impetus", {NAME: "fl-server"}),
    "fl-data": End("impetus", {NAME: "fl-data"}),
    "fl-client": End("impetus-clients", {NAME: "fl-client"}),
}
"""By their names in k8s/production.md."""


@dataclass(frozen=True)
class Flow:
    """A connection."""

    source: End
    target: End
    port: int


def closed_ends(objects: Sequence[Object], flow: Flow) -> list[str]:
    """The ends at which no policy allows the connection: "egress", "ingress"."""
    ends = {"egress": (flow.source, flow.target), "ingress": (flow.target, flow.source)}
    return [way for way, (end, peer) in ends.items() if not _open(objects, end, way, peer, flow)]


def _open(objects: Sequence[Object], end: End, way: str, peer: End, flow: Flow) -> bool:
    """Whether an end is open: no policy is for it, or a rule has the peer and the port."""
    if not end.namespace:
        return True
    own = [
        policy["spec"]
        for policy in of_kind(objects, "NetworkPolicy")
        if namespace(policy) == end.namespace
        and selects(policy["spec"]["podSelector"], dict(end.labels or {}))
        and way.capitalize() in policy["spec"]["policyTypes"]
    ]
    rules = [rule for spec in own for rule in spec.get(way, [])]
    peers = "to" if way == "egress" else "from"
    return not own or any(
        _has_port(objects, rule, flow)
        and (not rule.get(peers) or any(_is(rule_peer, end, peer) for rule_peer in rule[peers]))
        for rule in rules
    )


def _has_port(objects: Sequence[Object], rule: Mapping[str, Any], flow: Flow) -> bool:
    """By number, or by the name of a port of the target's pod."""
    names = {
        name
        for pod in selected(objects, flow.target.namespace, flow.target.labels or {})
        for name, number in pod.ports.items()
        if number == flow.port
    }
    return any(port["port"] in {flow.port, *names} for port in rule.get("ports", [{"port": flow.port}]))


def _is(entry: Mapping[str, Any], end: End, peer: End) -> bool:
    """Whether an entry of a rule is a peer. Without a namespaceSelector it is of the policy's own namespace."""
    spaces = entry.get("namespaceSelector", {"matchLabels": {"kubernetes.io/metadata.name": end.namespace}})
    labels = {"kubernetes.io/metadata.name": peer.namespace}
    pods = entry.get("podSelector", {})
    return bool(peer.namespace) and selects(spaces, labels) and selects(pods, dict(peer.labels or {}))
