"""Every connection that k8s/production.md names is open at both ends, and nothing else of the operators' pods is."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import read_page
from tests.k8s.flows import ENDS, Flow, closed_ends
from tests.k8s.manifests import EVERYTHING, ROOT, build, needs_kubectl
from tests.k8s.objects import namespace, of_kind

pytestmark = needs_kubectl

_ROW = r"^\| ([^|]+) \| ([^|]+) \| (\d+) \| `(base|gpu-clients|components/[\w-]+)` \|$"
ROWS = re.findall(_ROW, read_page("k8s/production.md"), re.MULTILINE)


@pytest.mark.parametrize(("source", "target", "port", "part"), ROWS)
def test_a_connection_of_the_page_is_open_at_both_ends(source: str, target: str, port: str, part: str) -> None:
    """The source may send to the destination's port, and the destination may receive from the source."""
    assert (ROOT / "k8s" / part / "kustomization.yaml").is_file()
    assert closed_ends(build(EVERYTHING), Flow(ENDS[source], ENDS[target], int(port))) == []


def test_each_policy_with_rules_is_of_a_row() -> None:
    """Without the rules of one policy at least one row is closed, so the page misses none."""
    flows = [Flow(ENDS[source], ENDS[target], int(port)) for source, target, port, _ in ROWS]
    for policy in of_kind(build(EVERYTHING), "NetworkPolicy"):
        if not policy["spec"].keys() & {"ingress", "egress"}:
            continue
        others = build(EVERYTHING)
        for other in of_kind(others, "NetworkPolicy"):
            if (other["metadata"]["name"], namespace(other)) == (policy["metadata"]["name"], namespace(policy)):
                other["spec"].pop("ingress", None)
                other["spec"].pop("egress", None)
        assert any(closed_ends(others, flow) for flow in flows), policy["metadata"]["name"]


@pytest.mark.parametrize(
    ("source", "target", "port"),
    [
        ("admin", "fl-server", 7073),
        ("probes", "fl-server", 7071),
        ("fl-client", "fl-server", 7071),
        ("admin", "any address", 443),
        ("fl-server", "fl-client", 7080),
        ("any address", "fl-server", 7071),
        ("any address", "fl-server", 7075),
    ],
)
def test_other_connections_are_closed(source: str, target: str, port: int) -> None:
    """A label opens its own port alone."""
    assert closed_ends(build(EVERYTHING), Flow(ENDS[source], ENDS[target], port)) != []
