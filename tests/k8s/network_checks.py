"""Checks of selectors (Services, monitors, routes, budgets) and of network policies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.k8s.objects import (
    Object,
    Pod,
    find,
    is_server,
    is_worker,
    namespace,
    of_kind,
    pods,
    scaled_from,
    selected,
    selects,
    title,
)

Problems = Iterator[str]


def selectors_match(objects: Sequence[Object]) -> Problems:
    """Workloads select their own pods; Services, budgets and monitors select at least one pod."""
    for checked in objects:
        spec, kind, where = checked.get("spec", {}), checked["kind"], namespace(checked)
        if kind in {"StatefulSet", "DaemonSet", "Deployment"}:
            if not selects(spec["selector"], Pod(checked).labels):
                yield f"{title(checked)}: its selector is not its own template's"
        elif kind == "Service":
            if not selected(objects, where, spec["selector"]):
                yield f"{title(checked)}: no pod has its labels"
        elif kind in {"PodDisruptionBudget", "NetworkPolicy"}:
            wanted = (spec.get("podSelector") or spec.get("selector") or {}).get("matchLabels", {})
            if wanted.keys() & {"impetus/admin", "impetus/probes"}:
                continue  # of pods that people make
            if not selected(objects, where, wanted):
                yield f"{title(checked)}: no pod has its labels"


def services_lead_to_ports(objects: Sequence[Object]) -> Problems:
    """Each targetPort is a port of the selected pods; an internal Service has no external fields."""
    for service in of_kind(objects, "Service"):
        for pod in selected(objects, namespace(service), service["spec"]["selector"]):
            for port in service["spec"]["ports"]:
                if port["targetPort"] not in {*pod.ports, *pod.ports.values()}:
                    yield f"{title(service)}: {pod.title} has no port {port['targetPort']}"
        outside = "externalTrafficPolicy" in service["spec"] or any(
            "nodePort" in port for port in service["spec"]["ports"]
        )
        if outside and service["spec"].get("type", "ClusterIP") == "ClusterIP":
            yield f"{title(service)}: sets how it is reached from outside, but is internal"
    for workload in of_kind(objects, "StatefulSet"):  # the workload's own Service is headless
        found = find(objects, "Service", workload["spec"]["serviceName"], namespace(workload))
        if found is None or found["spec"].get("clusterIP") != "None":
            yield f"{title(workload)}: {workload['spec']['serviceName']} is no headless Service"


def monitors_find_ports(objects: Sequence[Object]) -> Problems:
    """A ServiceMonitor's port is a Service's, and its jobLabel a label there; a PodMonitor's are pods'."""
    for monitor in of_kind(objects, "ServiceMonitor"):
        spec = monitor["spec"]
        behind = [
            service
            for service in of_kind(objects, "Service")
            if selects(spec["selector"], service["metadata"]["labels"]) and namespace(service) == namespace(monitor)
        ]
        if not any(spec["jobLabel"] in service["metadata"]["labels"] for service in behind):
            yield f"{title(monitor)}: no Service has its labels and the label {spec['jobLabel']}"
        ports = {port["name"] for service in behind for port in service["spec"]["ports"]}
        yield from (
            f"{title(monitor)}: no Service has the port {at['port']}"
            for at in spec["endpoints"]
            if at["port"] not in ports
        )
    for monitor in of_kind(objects, "PodMonitor"):
        for pod in pods(objects):
            if selects(monitor["spec"]["selector"], pod.labels):
                ports = set(pod.ports)
                wanted = [at["port"] for at in monitor["spec"]["podMetricsEndpoints"]]
                yield from (f"{title(monitor)}: {pod.title} has no port {port}" for port in wanted if port not in ports)


def routes_lead_to_services(objects: Sequence[Object]) -> Problems:
    """A TLSRoute's backend is a port of a Service, and its parent a listener that passes TLS through."""
    for route in of_kind(objects, "TLSRoute"):
        where = namespace(route)
        for backend in (backend for rule in route["spec"]["rules"] for backend in rule["backendRefs"]):
            service = find(objects, "Service", backend["name"], where)
            if service is None or backend["port"] not in {port["port"] for port in service["spec"]["ports"]}:
                yield f"{title(route)}: there is no Service {backend['name']} with port {backend['port']}"
        for parent in route["spec"]["parentRefs"]:
            gateway = find(objects, "Gateway", parent["name"], where)
            listeners = {listener["name"]: listener for listener in gateway["spec"]["listeners"]} if gateway else {}
            if listeners.get(parent["sectionName"], {}).get("tls", {}).get("mode") != "Passthrough":
                yield f"{title(route)}: {parent['name']}/{parent['sectionName']} is no listener that passes TLS through"


def autoscalers_have_a_target(objects: Sequence[Object]) -> Problems:
    """An autoscaler's target is a workload of its namespace."""
    for scaler in of_kind(objects, "HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        if find(objects, target["kind"], target["name"], namespace(scaler)) is None:
            yield f"{title(scaler)}: there is no {target['kind']} {target['name']}"


def budgets_have_an_effect(objects: Sequence[Object]) -> Problems:
    """A budget keeps at least one of its pods from evictions, and no pod that is not healthy."""
    for budget in of_kind(objects, "PodDisruptionBudget"):
        spec = budget["spec"]
        for pod in selected(objects, namespace(budget), spec["selector"]["matchLabels"]):
            replicas = scaled_from(objects, pod.owner)
            may_go = spec["maxUnavailable"] if "maxUnavailable" in spec else replicas - spec["minAvailable"]
            if may_go == "100%" or (isinstance(may_go, int) and may_go >= replicas):
                yield f"{title(budget)}: all of {replicas} may go, so it never blocks an eviction"
        if spec.get("unhealthyPodEvictionPolicy") != "AlwaysAllow":
            yield f"{title(budget)}: a pod that is never ready keeps its node from a drain"


def policies_close_everything(objects: Sequence[Object]) -> Problems:
    """Each namespace with pods has a policy for all of them that denies all traffic in both directions."""
    for where in {pod.namespace for pod in pods(objects)}:
        if not any(
            namespace(policy) == where
            and policy["spec"]["podSelector"] == {}
            and set(policy["spec"]["policyTypes"]) == {"Ingress", "Egress"}
            and not policy["spec"].keys() & {"ingress", "egress"}
            for policy in of_kind(objects, "NetworkPolicy")
        ):
            yield f"Namespace/{where}: no policy denies by default"


def policies_open_what_is_needed(objects: Sequence[Object]) -> Problems:
    """Clients may connect, and by label operators, probes and Prometheus; a pod reaches its settings' addresses."""
    for pod in pods(objects):
        rules = list(_rules(objects, pod, "ingress", "from"))
        scraped = any(selects(monitor["spec"]["selector"], pod.labels) for monitor in of_kind(objects, "PodMonitor"))
        scraped |= is_server(pod) and bool(of_kind(objects, "ServiceMonitor"))
        wanted = {"grpc", "admin", "enroll", "token", "web", "workers", "data", *(["metrics"] if scraped else [])}
        if not is_worker(pod):
            wanted.add("health")
        for port in sorted(wanted & pod.ports.keys() - {port for _, port in rules}):
            yield f"{pod.title}: no policy lets anybody reach its port {port}"
        for peers, opened in rules:
            if opened not in pod.ports:
                yield f"{pod.title}: a policy opens {opened}, which is none of its ports"
            if opened in {"admin", "metrics", "health", "token", "workers"} and not all(
                "podSelector" in peer for peer in peers or [{}]
            ):
                yield f"{pod.title}: its port {opened} is open to whole networks"
        reached = {port for _, port in _rules(objects, pod, "egress", "to")}
        yield from (f"{pod.title}: no policy lets it reach port {port}" for port in sorted(_calls(pod) - reached))


def _rules(objects: Sequence[Object], pod: Pod, direction: str, peers: str) -> Iterator[tuple[list[Object], str | int]]:
    """Peers and port of every rule for a pod; "any" for a rule that names no port."""
    for policy in of_kind(objects, "NetworkPolicy"):
        if namespace(policy) == pod.namespace and selects(policy["spec"]["podSelector"], pod.labels):
            for rule in policy["spec"].get(direction, []):
                yield from ((rule.get(peers, []), port["port"]) for port in rule.get("ports", [{"port": "any"}]))


def _calls(pod: Pod) -> set[int]:
    """Ports to which a pod's program connects: DNS and the coordinator, or the database."""
    if is_worker(pod):
        return {53, 443, 7076}
    if not is_server(pod):
        return {53, 7070, 7074}
    environment = {variable["name"] for container in pod.containers for variable in container.get("env", [])}
    wanted = {name: {53, port} for name, port in {"PGPASSWORD": 5432, "OTEL_EXPORTER_OTLP_ENDPOINT": 4317}.items()}
    tokens = {53, 443} if "token" in pod.ports else set()
    return tokens.union(*(ports for name, ports in wanted.items() if name in environment))
