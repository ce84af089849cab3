"""The checks find pods that are not selected or that are open to all."""

from __future__ import annotations

from typing import Any

from tests.k8s import network_checks as checks
from tests.k8s.breaking import GONE, NAME, SERVER, assert_sees, broken, cases, of_module
from tests.k8s.manifests import needs_kubectl

pytestmark = needs_kubectl

BAD = [
    (
        checks.selectors_match, SERVER, f"spec selector matchLabels {NAME}", "server",
        "its selector is not its own template's",
    ),
    (
        checks.selectors_match, "Service/fl-server", f"spec selector {NAME}", "server",
        "Service/fl-server: no pod has its labels",
    ),
    (
        checks.selectors_match, "PodDisruptionBudget/fl-server", f"spec selector matchLabels {NAME}", "x",
        "PodDisruptionBudget/fl-server: no pod has its labels",
    ),
    (
        checks.selectors_match, "NetworkPolicy/fl-server-probes", f"spec podSelector matchLabels {NAME}",
        "x", "NetworkPolicy/fl-server-probes: no pod has its labels",
    ),
    (checks.services_lead_to_ports, "Service/fl-server", "spec ports 0 targetPort", 7079, "has no port 7079"),
    (checks.services_lead_to_ports, "Service/fl-server-internal", "spec ports 0 targetPort", "adm", "has no port adm"),
    (
        checks.services_lead_to_ports, SERVER, "spec serviceName", "fl-server",
        "fl-server is no headless Service",
    ),
    (checks.services_lead_to_ports, "Service/fl-server", "spec externalTrafficPolicy", "Local", "sets how"),
    (checks.services_lead_to_ports, "Service/fl-server", "spec ports 0 nodePort", 30070, "sets how it is reached"),
    (checks.monitors_find_ports, "ServiceMonitor/", "spec endpoints 0 port", "http", "no Service has the port http"),
    (checks.monitors_find_ports, "ServiceMonitor/", "spec jobLabel", "job", "no Service has its labels and the label"),
    (checks.monitors_find_ports, "PodMonitor/", "spec podMetricsEndpoints 0 port", "http", "has no port http"),
    (
        checks.routes_lead_to_services, "TLSRoute/", "spec rules 0 backendRefs 0 port", 443,
        "no Service fl-server with port 443",
    ),
    (
        checks.routes_lead_to_services, "TLSRoute/", "spec parentRefs 0 sectionName", "https",
        "impetus/https is no listener",
    ),
    (
        checks.routes_lead_to_services, "Gateway/", "spec listeners 0 tls mode", "Terminate",
        "impetus/clients is no listener that passes TLS through",
    ),
    (
        checks.autoscalers_have_a_target, "HorizontalPodAutoscaler/fl-data", "spec scaleTargetRef name", "fl-date",
        "there is no Deployment fl-date",
    ),
    (checks.budgets_have_an_effect, "PodDisruptionBudget/fl-server", "spec maxUnavailable", 1, "all of 1 may go"),
    (checks.budgets_have_an_effect, "PodDisruptionBudget/fl-server", "spec maxUnavailable", "100%", "all of 1 may go"),
    (
        checks.budgets_have_an_effect, "PodDisruptionBudget/fl-server", "spec",
        {"minAvailable": 0, "selector": {"matchLabels": {NAME: "fl-server"}}}, "all of 1 may go",
    ),
    (
        checks.budgets_have_an_effect, "PodDisruptionBudget/", "spec unhealthyPodEvictionPolicy", "IfHealthyBudget",
        "a pod that is never ready keeps its node from a drain",
    ),
    (
        checks.policies_close_everything, "NetworkPolicy/default-deny", "spec policyTypes", ["Ingress"],
        "no policy denies by default",
    ),
    (
        checks.policies_close_everything, "NetworkPolicy/default-deny", "spec ingress", [{}],
        "no policy denies by default",
    ),
    *(
        (
            checks.policies_open_what_is_needed, f"NetworkPolicy/fl-server-{name}", "spec podSelector matchLabels x",
            "y",
            f"no policy lets anybody reach its port {port}",
        )
        for name, port in {"clients": "grpc", "admin": "admin", "probes": "health", "metrics": "metrics",
            "enrollment": "enroll"}.items()
    ),
    (
        checks.policies_open_what_is_needed, "NetworkPolicy/fl-server-admin", "spec ingress 0 from", GONE,
        "its port admin is open to whole networks",
    ),
    (
        checks.policies_open_what_is_needed, "NetworkPolicy/fl-server-probes", "spec ingress 0 from", GONE,
        "its port health is open to whole networks",
    ),
    (
        checks.policies_open_what_is_needed, "NetworkPolicy/fl-server-clients", "spec ingress 0 ports", GONE,
        "a policy opens any, which is none of its ports",
    ),
    (
        checks.policies_open_what_is_needed, "NetworkPolicy/fl-server-postgres", "spec egress 0 ports 0 port", 5433,
        "no policy lets it reach port 5432",
    ),
    (
        checks.policies_open_what_is_needed, "NetworkPolicy/fl-client-coordinator", "spec egress 2", GONE,
        "no policy lets it reach port 53",
    ),
]  # fmt: skip


@cases(BAD)
def test_a_check_finds_the_problem(check: Any, name: str, path: Any, value: Any, words: str) -> None:
    """The problem names the object."""
    assert_sees(check, broken(name, path, value), words)


def test_every_check_has_a_failing_case() -> None:
    """A check without a failing case would be useless."""
    assert {check for check, *_ in BAD} == of_module(checks)
