"""Kubernetes objects: their selectors, pods, and the settings of their programs."""

from __future__ import annotations

import functools
import itertools
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]
WORKLOADS = ("StatefulSet", "DaemonSet", "Deployment", "Job")


def title(thing: Object) -> str:
    """Kind and name, as a problem names it."""
    return f"{thing['kind']}/{thing['metadata']['name']}"


def of_kind(objects: Sequence[Object], *kinds: str) -> list[Object]:
    """Those of these kinds."""
    return [candidate for candidate in objects if candidate["kind"] in kinds]


def namespace(thing: Object) -> str:
    """Its namespace; "" without one."""
    return str(thing["metadata"].get("namespace", ""))


def find(objects: Sequence[Object], kind: str, name: str, where: str) -> Object | None:
    """The object of that name in a namespace."""
    return next(
        (
            candidate
            for candidate in of_kind(objects, kind)
            if (candidate["metadata"]["name"], namespace(candidate)) == (name, where)
        ),
        None,
    )


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector's matchLabels are all there; an empty selector takes everything."""
    assert set(selector) <= {"matchLabels"}, f"only matchLabels are understood here, got {selector}"
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


@dataclass(frozen=True)
class Pod:
    """The pod of a workload's template."""

    owner: Object

    @property
    def title(self) -> str:
        """Title of the workload."""
        return title(self.owner)

    @property
    def namespace(self) -> str:
        """Namespace of the workload."""
        return namespace(self.owner)

    @property
    def labels(self) -> dict[str, str]:
        """Of the template."""
        return dict(self.owner["spec"]["template"]["metadata"]["labels"])

    @property
    def spec(self) -> Object:
        """The pod's own."""
        return dict(self.owner["spec"]["template"]["spec"])

    @property
    def containers(self) -> list[Object]:
        """Its containers and init containers."""
        return [*self.spec["containers"], *self.spec.get("initContainers", [])]

    @property
    def ports(self) -> dict[str, int]:
        """Number of each named port."""
        return {
            port["name"]: port["containerPort"] for container in self.containers for port in container.get("ports", [])
        }

    @property
    def claims(self) -> dict[str, Object]:
        """Its volume claim templates."""
        return {claim["metadata"]["name"]: claim for claim in self.owner["spec"].get("volumeClaimTemplates", [])}

    @property
    def volumes(self) -> dict[str, Object]:
        """Its volumes by name, without the claims."""
        return {volume["name"]: volume for volume in self.spec.get("volumes", [])}

    def probes(self) -> Iterator[tuple[str, Object]]:
        """Name and content of each probe."""
        for container in self.containers:
            yield from (
                (key, container[key]) for key in ("startupProbe", "livenessProbe", "readinessProbe") if key in container
            )


def pods(objects: Sequence[Object]) -> list[Pod]:
    """Of every workload."""
    return [Pod(workload) for workload in of_kind(objects, *WORKLOADS)]


def selected(objects: Sequence[Object], where: str, labels: Mapping[str, str]) -> list[Pod]:
    """The pods of a namespace that have these labels."""
    return [pod for pod in pods(objects) if pod.namespace == where and labels.items() <= pod.labels.items()]


def is_server(pod: Pod) -> bool:
    """Whether it runs a coordinator."""
    return pod.labels["app.kubernetes.io/name"] == "fl-server"


def is_worker(pod: Pod) -> bool:
    """Whether it runs a worker of a coordinator."""
    return pod.labels["app.kubernetes.io/name"] == "fl-data"


def scaled_from(objects: Sequence[Object], workload: Object) -> int:
    """The fewest pods of a workload: its own number, or that of its autoscaler."""
    for scaler in of_kind(objects, "HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        if (target["kind"], target["name"]) == (workload["kind"], workload["metadata"]["name"]):
            return int(scaler["spec"]["minReplicas"])
    return int(workload["spec"].get("replicas", 1))


def config_files(objects: Sequence[Object], pod: Pod) -> dict[str, str]:
    """Path and text of every file that a pod gets from ConfigMaps among the objects."""
    files: dict[str, str] = {}
    for mount in (mount for container in pod.containers for mount in container.get("volumeMounts", [])):
        reference = pod.volumes.get(mount["name"], {}).get("configMap")
        if reference and (found := find(objects, "ConfigMap", reference["name"], pod.namespace)):
            files |= {f"{mount['mountPath']}/{key}": text for key, text in found["data"].items()}
    return files


def settings(objects: Sequence[Object], pod: Pod) -> list[Object]:
    """Settings of a pod's program from its `--config` files, as far as they are ConfigMaps.

    One, or one for each file that a path with a variable may mean.
    """
    files = config_files(objects, pod)
    arguments = pod.containers[0]["args"]
    paths = [path for option, path in itertools.pairwise(arguments) if option == "--config"]
    layers = [_meant(path, files) for path in paths]
    width = max(map(len, layers), default=0)
    texts = [[layer[min(number, len(layer) - 1)] for layer in layers if layer] for number in range(width)]
    return [functools.reduce(_laid_on, map(tomllib.loads, layers), {}) for layers in texts]


def _meant(path: str, files: Mapping[str, str]) -> list[str]:
    before, variable, after = path.partition("$(NODE_NAME)")
    if not variable:
        return [files[path]] if path in files else []
    return [files[name] for name in sorted(files) if name.startswith(before) and name.endswith(after)]


def _laid_on(below: Any, above: Any) -> Any:
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return below | {key: _laid_on(below.get(key), value) for key, value in above.items()}


def lies_outside(pod: Pod) -> bool:
    """Whether a pod's files are in an object store, and a coordinator's ledger in PostgreSQL."""
    mounted = {volume.get("secret", {}).get("secretName") for volume in pod.volumes.values()}
    return {"fl-server-objects", *([] if is_worker(pod) else ["fl-server-ledger"])} <= mounted
