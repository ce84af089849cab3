"""Checks that pods fit their programs and their nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fl_common.settings import split_address
from fl_server.app import STOP_S
from fl_server.settings.config import ServerConfig
from tests.k8s.objects import Object, Pod, find, is_server, is_worker, lies_outside, pods, scaled_from, settings

Problems = Iterator[str]
PORTS = {
    "grpc": "listen",
    "admin": "admin_listen",
    "metrics": "metrics_listen",
    "health": "health_listen",
    "token": "token_listen",
    "web": "web_listen",
}
"""Name of a port of a coordinator or a daemon -> the setting with its address."""
WORKER_PORTS = {"data": "workers.serve", "metrics": "metrics_listen", "health": "health_listen"}
"""The same of a worker, which reads the coordinator's settings too."""
ANYWHERE = "0.0.0.0"  # noqa: S104 - the address of a container's listener
PROBED = frozenset({"live", "", "fl.v1.Coordinator"})
START_S = 3.0
"""Seconds of CPU until a coordinator serves, measured."""
FEWEST_WORKERS = 2
"""One may end at any time."""
MOST_HUNG_S = 30
"""Longest grace of a pod that does not answer its liveness probe."""
_RESTRICTED = ("configMap", "secret", "projected", "emptyDir", "downwardAPI", "csi", "persistentVolumeClaim")
"""Kinds of volumes that the level "restricted" allows."""


def _runs_fl_server(pod: Pod) -> bool:
    return is_server(pod) or is_worker(pod)


def ports_are_the_settings(objects: Sequence[Object]) -> Problems:
    """A pod's named ports are the ports of its program's listeners, on all addresses."""
    for pod in pods(objects):
        for config in settings(objects, pod):
            of_coordinator = PORTS | ({"workers": "workers.listen"} if "workers" in config else {})
            for name, key in (WORKER_PORTS if is_worker(pod) else of_coordinator).items():
                section, _, last = key.rpartition(".")
                values = config[section] if section else config
                host, port = split_address(values[last]) if last in values else (ANYWHERE, None)
                if pod.ports.get(name) != port:
                    yield f"{pod.title}: its port {name} is {pod.ports.get(name)}, {key} is {port}"
                if host != ANYWHERE:
                    yield f"{pod.title}: {key} is {host}, which is not reachable from outside the pod"


def probes_ask_what_is_answered(objects: Sequence[Object]) -> Problems:
    """gRPC probes use the port without TLS and one of its services; other probes use an existing port."""
    for pod in pods(objects):
        for name, probe in pod.probes():
            if grpc := probe.get("grpc"):
                if grpc["port"] != pod.ports.get("health"):
                    yield f"{pod.title}: {name} asks port {grpc['port']}, health is {pod.ports.get('health')}"
                if grpc.get("service", "") not in PROBED:
                    yield f"{pod.title}: {name} asks for {grpc['service']}, which is never served"
            elif probe["httpGet"]["port"] not in {*pod.ports, *pod.ports.values()}:
                yield f"{pod.title}: {name} asks port {probe['httpGet']['port']}, which is none of its own"
        kinds = {name: probe.get("grpc", {}).get("service") for name, probe in pod.probes()}
        if _runs_fl_server(pod) and kinds != {
            "startupProbe": "live", "livenessProbe": "live", "readinessProbe": "fl.v1.Coordinator"
        }:  # fmt: skip
            yield f"{pod.title}: probes ask for {kinds}: alive is live, and ready is fl.v1.Coordinator"


def stopping_takes_its_time(objects: Sequence[Object]) -> Problems:
    """The grace period is longer than preStop, the drain and the program's exit together."""
    for pod in filter(_runs_fl_server, pods(objects)):
        for config in settings(objects, pod):
            drain = config.get("drain_grace_s", ServerConfig.model_fields["drain_grace_s"].default)
            sleep = pod.containers[0].get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
            wanted, given = sleep + drain + STOP_S, pod.spec.get("terminationGracePeriodSeconds", 30)
            if given <= wanted:
                yield f"{pod.title}: a grace of {given} s, expected more than {wanted:g} s"
            if not sleep:
                yield f"{pod.title}: no preStop sleep, so it stops listening before load balancers know"


def a_hung_coordinator_is_killed_soon(objects: Sequence[Object]) -> Problems:
    """The liveness probe has its own grace: a program that does not answer does not drain either."""
    for pod in filter(_runs_fl_server, pods(objects)):
        grace = dict(pod.probes()).get("livenessProbe", {}).get("terminationGracePeriodSeconds")
        if grace is None or grace > MOST_HUNG_S:
            yield f"{pod.title}: a hung program is killed after {grace or 'the pod grace'}, expected {MOST_HUNG_S} s"


def probes_leave_time_to_start(objects: Sequence[Object]) -> Problems:
    """The first probe comes after a normal start, which would otherwise end in the event Unhealthy."""
    for pod in pods(objects):
        probes = dict(pod.probes())
        name = "startupProbe" if "startupProbe" in probes else "readinessProbe"
        if (delay := probes.get(name, {}).get("initialDelaySeconds", 0)) <= START_S:
            yield f"{pod.title}: {name} begins after {delay} s, a start takes {START_S} s of CPU"


def the_reason_of_an_exit_is_shown(objects: Sequence[Object]) -> Problems:
    """`kubectl describe pod` shows the last lines of a program that could not start."""
    for pod in pods(objects):
        for container in pod.containers:
            if container.get("terminationMessagePolicy") != "FallbackToLogsOnError":
                yield f"{pod.title}/{container['name']}: the reason of an exit is only in its log"


def one_coordinator(objects: Sequence[Object]) -> Problems:
    """A state directory never has two coordinators, and it outlives the pod unless ledger and files lie outside."""
    for pod in pods(objects):
        spec = pod.owner["spec"]
        if is_server(pod):
            if pod.owner["kind"] == "Deployment" and lies_outside(pod):
                if spec["replicas"] != 2:
                    yield f"{pod.title}: expected a leader and a standby"
            elif pod.owner["kind"] != "StatefulSet" or spec["replicas"] != 1:
                yield f"{pod.title}: expected a StatefulSet with one replica"
            for name, claim in pod.claims.items():
                if set(claim["spec"]["accessModes"]) - {"ReadWriteOnce", "ReadWriteOncePod"}:
                    yield f"{pod.title}: the volume {name} can be written by several nodes"
            if spec.get("persistentVolumeClaimRetentionPolicy", {}).get("whenDeleted") == "Delete":
                yield f"{pod.title}: its volume goes with it"
        elif not is_worker(pod) and spec["updateStrategy"].get("rollingUpdate", {}).get("maxSurge", 0) != 0:
            yield f"{pod.title}: maxSurge starts a second daemon on the node's state directory"


def workers_are_scaled(objects: Sequence[Object]) -> Problems:
    """An autoscaler has their number, they share nothing but the object store, and a roll-out ends none too early."""
    for pod in filter(is_worker, pods(objects)):
        spec = pod.owner["spec"]
        if "replicas" in spec:
            yield f"{pod.title}: an apply would set the number that its autoscaler has chosen"
        if scaled_from(objects, pod.owner) < FEWEST_WORKERS:
            yield f"{pod.title}: expected an autoscaler with {FEWEST_WORKERS} pods or more"
        if spec["strategy"]["rollingUpdate"]["maxUnavailable"] != 0:
            yield f"{pod.title}: a roll-out ends a worker before the next one serves"
        if not lies_outside(pod):
            yield f"{pod.title}: its updates are in no object store"


def images_are_pinned(objects: Sequence[Object]) -> Problems:
    """Images name their registry, and have a tag other than latest, or a digest.

    A node asks the public registry for a name without a registry, where somebody else may own it.
    """
    for pod in pods(objects):
        for image in (container["image"] for container in pod.containers):
            tag = image.rpartition("/")[2].partition(":")[2]
            if "@sha256:" not in image and tag in {"", "latest"}:
                yield f"{pod.title}: the image {image} is not pinned"
            registry, slash, _ = image.partition("/")
            if not slash or not ("." in registry or ":" in registry or registry == "localhost"):
                yield f"{pod.title}: the image {image} names no registry"


def pods_are_restricted(objects: Sequence[Object]) -> Problems:
    """Pods fit Pod Security's level "restricted" and also have a read-only root and no API token."""
    for pod in pods(objects):
        yield from (f"{pod.title}: {problem}" for problem in _of_pod(pod))
        open_to_paths = find(objects, "Namespace", pod.namespace, "") or {"metadata": {}}
        level = open_to_paths["metadata"].get("labels", {}).get("pod-security.kubernetes.io/enforce")
        allowed = (*_RESTRICTED, "hostPath") if level == "privileged" else _RESTRICTED
        for name, volume in pod.volumes.items():
            if not set(volume) <= {"name", *allowed}:
                yield f"{pod.title}: the volume {name} is not allowed at the level {level}"
            if "emptyDir" in volume and "sizeLimit" not in volume["emptyDir"]:
                yield f"{pod.title}: the volume {name} may fill the node's disk"
        for container in pod.containers:
            yield from (f"{pod.title}/{container['name']}: {problem}" for problem in _of_container(container))


def _of_pod(pod: Pod) -> Problems:
    spec, context = pod.spec, pod.spec.get("securityContext", {})
    if not context.get("runAsNonRoot") or not context.get("runAsUser") or not context.get("runAsGroup"):
        yield "may run as root"
    if not context.get("fsGroup"):
        yield "no fsGroup, so its volumes belong to root"
    if context.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "no seccomp profile"
    if spec.get("automountServiceAccountToken") is not False or "serviceAccountName" not in spec:
        yield "gets a token of the API"
    yield from (f"asks for {key}" for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key))


def _of_container(container: Object) -> Problems:
    context = container.get("securityContext", {})
    if context.get("privileged") or context.get("allowPrivilegeEscalation") is not False:
        yield "may become privileged"
    if not context.get("readOnlyRootFilesystem"):
        yield "its root can be written"
    if context.get("capabilities") != {"drop": ["ALL"]}:
        yield "has capabilities"
    if context.get("runAsUser") == 0 or context.get("runAsNonRoot") is False:
        yield "runs as root"
    resources = container.get("resources", {})
    for kind, names in {"requests": {"cpu", "memory", "ephemeral-storage"}, "limits": {"memory"}}.items():
        if missing := names - set(resources.get(kind, {})):
            yield f"no {kind} of {', '.join(sorted(missing))}"
    if "cpu" in resources.get("limits", {}):
        yield "a limit of CPU stops its event loop"


def gpus_come_with_all_they_need(objects: Sequence[Object]) -> Problems:
    """A pod that requests a GPU tolerates and selects GPU nodes and uses NVIDIA's runtime."""
    for pod in pods(objects):
        limits = [container.get("resources", {}).get("limits", {}) for container in pod.containers]
        if not any("nvidia.com/gpu" in limit for limit in limits):
            continue
        if not any(toleration["key"] == "nvidia.com/gpu" for toleration in pod.spec.get("tolerations", [])):
            yield f"{pod.title}: a GPU without the toleration of its nodes"
        if pod.spec.get("runtimeClassName") != "nvidia":
            yield f"{pod.title}: a GPU without the runtime class nvidia"
        if "nvidia.com/gpu.present" not in pod.spec.get("nodeSelector", {}):
            yield f"{pod.title}: a GPU, but any node is chosen"


def shards_are_distinct(objects: Sequence[Object]) -> Problems:
    """No two nodes of a set have the same shard, and every index is in the partition."""
    for pod in pods(objects):
        configs = [config for config in settings(objects, pod) if "shard" in config]
        indices = [config["shard"]["index"] for config in configs if "index" in config["shard"]]
        if len(set(indices)) < len(indices):
            yield f"{pod.title}: two nodes have the same shard, of {indices}"
        yield from (
            f"{pod.title}: the shard {config['shard']['index']} is none of {config['shard']['partition']['clients']}"
            for config in configs
            if "partition" in config["shard"] and config["shard"]["index"] >= config["shard"]["partition"]["clients"]
        )
