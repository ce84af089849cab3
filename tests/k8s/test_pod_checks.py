"""The checks find pods that do not fit their program or their node."""

from __future__ import annotations

from typing import Any

from tests.k8s import pod_checks as checks
from tests.k8s.breaking import (
    CLIENT,
    CONTAINER,
    GONE,
    NODES,
    POD,
    SERVER,
    SETTINGS,
    assert_sees,
    broken,
    cases,
    of_module,
    swap,
)
from tests.k8s.manifests import needs_kubectl

pytestmark = needs_kubectl

BAD = [
    (checks.ports_are_the_settings, SERVER, f"{CONTAINER} ports =grpc containerPort", 7079, "its port grpc is 7079"),
    (
        checks.ports_are_the_settings, SETTINGS, "data server.toml", swap("0.0.0.0:7073", "0.0.0.0:7079"),
        "health_listen is 7079",
    ),
    (
        checks.ports_are_the_settings, SETTINGS, "data server.toml", swap("0.0.0.0:7071", "127.0.0.1:7071"),
        "admin_listen is 127.0.0.1",
    ),
    (
        checks.ports_are_the_settings, SETTINGS, "data production.toml", lambda text: 'listen = "0.0.0.0:70"\n' + text,
        "listen is 70",
    ),
    (checks.ports_are_the_settings, CLIENT, f"{CONTAINER} ports", [], "its port metrics is None"),
    (checks.probes_ask_what_is_answered, SERVER, f"{CONTAINER} readinessProbe grpc port", 7070, "asks port 7070"),
    (
        checks.probes_ask_what_is_answered, SERVER, f"{CONTAINER} readinessProbe grpc service", "ready",
        "is never served",
    ),
    (
        checks.probes_ask_what_is_answered, SERVER, f"{CONTAINER} livenessProbe grpc service", "fl.v1.Coordinator",
        "alive is live",
    ),
    (checks.probes_ask_what_is_answered, SERVER, f"{CONTAINER} startupProbe", GONE, "alive is live"),
    (checks.probes_ask_what_is_answered, CLIENT, f"{CONTAINER} readinessProbe httpGet port", 80, "asks port 80"),
    (checks.stopping_takes_its_time, SERVER, f"{POD} terminationGracePeriodSeconds", 127, "expected more than 127 s"),
    (checks.stopping_takes_its_time, SERVER, f"{POD} terminationGracePeriodSeconds", GONE, "a grace of 30 s"),
    (
        checks.stopping_takes_its_time, SETTINGS, "data server.toml", swap("drain_grace_s = 120",
        "drain_grace_s = 600"),
        "expected more than 607 s",
    ),
    (checks.stopping_takes_its_time, SERVER, f"{CONTAINER} lifecycle", GONE, "no preStop sleep"),
    (
        checks.a_hung_coordinator_is_killed_soon, SERVER,
        f"{CONTAINER} livenessProbe terminationGracePeriodSeconds", GONE, "after the pod grace",
    ),
    (
        checks.a_hung_coordinator_is_killed_soon, SERVER,
        f"{CONTAINER} livenessProbe terminationGracePeriodSeconds", 140, "killed after 140",
    ),
    (checks.probes_leave_time_to_start, SERVER, f"{CONTAINER} startupProbe initialDelaySeconds", GONE, "after 0 s"),
    (checks.probes_leave_time_to_start, CLIENT, f"{CONTAINER} readinessProbe initialDelaySeconds", 2, "after 2 s"),
    (checks.the_reason_of_an_exit_is_shown, CLIENT, f"{CONTAINER} terminationMessagePolicy", GONE, "only in its log"),
    (checks.one_coordinator, SERVER, "spec replicas", 2, "expected a StatefulSet with one replica"),
    (
        checks.one_coordinator, SERVER, "spec volumeClaimTemplates 0 spec accessModes", ["ReadWriteMany"],
        "can be written by several nodes",
    ),
    (
        checks.one_coordinator, SERVER, "spec persistentVolumeClaimRetentionPolicy whenDeleted", "Delete",
        "its volume goes with it",
    ),
    (
        checks.one_coordinator, CLIENT, "spec updateStrategy rollingUpdate maxSurge", 1,
        "maxSurge starts a second daemon",
    ),
    (checks.workers_are_scaled, "Deployment/fl-data", "spec replicas", 3, "an apply would set the number"),
    (checks.workers_are_scaled, "HorizontalPodAutoscaler/fl-data", "spec minReplicas", 1, "2 pods or more"),
    (
        checks.workers_are_scaled, "Deployment/fl-data", "spec strategy rollingUpdate maxUnavailable", 1,
        "a roll-out ends a worker",
    ),
    (checks.images_are_pinned, SERVER, f"{CONTAINER} image", "example.org/impetus/fl-server:latest", "is not pinned"),
    (checks.images_are_pinned, SERVER, f"{CONTAINER} image", "impetus/fl-server:0.1.0", "names no registry"),
    (checks.images_are_pinned, SERVER, f"{CONTAINER} image", "fl-server:0.1.0", "names no registry"),
    (checks.images_are_pinned, SERVER, f"{CONTAINER} image", "example.org:5000/impetus/fl-server", "is not pinned"),
    (checks.pods_are_restricted, SERVER, f"{POD} securityContext runAsNonRoot", False, "may run as root"),
    (checks.pods_are_restricted, SERVER, f"{POD} securityContext runAsUser", 0, "may run as root"),
    (checks.pods_are_restricted, SERVER, f"{POD} securityContext fsGroup", GONE, "no fsGroup"),
    (checks.pods_are_restricted, SERVER, f"{POD} securityContext seccompProfile", GONE, "no seccomp profile"),
    (checks.pods_are_restricted, SERVER, f"{POD} automountServiceAccountToken", GONE, "gets a token of the API"),
    (checks.pods_are_restricted, SERVER, f"{POD} hostNetwork", True, "asks for hostNetwork"),
    (
        checks.pods_are_restricted, SERVER, f"{POD} volumes =tmp", {"name": "tmp", "hostPath": {"path": "/"}},
        "is not allowed",
    ),
    (
        checks.pods_are_restricted, SERVER, f"{POD} volumes =tmp", {"name": "tmp", "emptyDir": {}},
        "may fill the node's disk",
    ),
    (checks.pods_are_restricted, CLIENT, f"{CONTAINER} securityContext privileged", True, "may become privileged"),
    (
        checks.pods_are_restricted, CLIENT, f"{CONTAINER} securityContext allowPrivilegeEscalation", GONE,
        "may become privileged",
    ),
    (checks.pods_are_restricted, CLIENT, f"{CONTAINER} securityContext runAsUser", 0, "runs as root"),
    (
        checks.pods_are_restricted, SERVER, f"{CONTAINER} securityContext readOnlyRootFilesystem", False,
        "its root can be written",
    ),
    (
        checks.pods_are_restricted, SERVER, f"{CONTAINER} securityContext capabilities", {"add": ["ALL"]},
        "has capabilities",
    ),
    (checks.pods_are_restricted, SERVER, f"{CONTAINER} resources requests memory", GONE, "no requests of memory"),
    (checks.pods_are_restricted, SERVER, f"{CONTAINER} resources limits cpu", "1", "a limit of CPU"),
    (checks.gpus_come_with_all_they_need, CLIENT, f"{POD} tolerations", [], "without the toleration"),
    (checks.gpus_come_with_all_they_need, CLIENT, f"{POD} runtimeClassName", GONE, "without the runtime class"),
    (
        checks.gpus_come_with_all_they_need, CLIENT, f"{POD} nodeSelector", {"impetus/client": "true"},
        "any node is chosen",
    ),
    (
        checks.shards_are_distinct, NODES, "data gpu-1.toml", swap("index = 1", "index = 0"),
        "two nodes have the same shard",
    ),
    (checks.shards_are_distinct, NODES, "data gpu-1.toml", swap("index = 1", "index = 2"), "the shard 2 is none of 2"),
]  # fmt: skip


@cases(BAD)
def test_a_check_finds_the_problem(check: Any, name: str, path: Any, value: Any, words: str) -> None:
    """The problem names the object."""
    assert_sees(check, broken(name, path, value), words)


def test_every_check_has_a_failing_case() -> None:
    """A check without a failing case would be useless."""
    assert {check for check, *_ in BAD} == of_module(checks)


def test_a_digest_pins_an_image() -> None:
    """A name with its registry and a digest, as kustomize's `digest` makes it, needs no tag."""
    image = f"registry.example.org/impetus/fl-server@sha256:{'0' * 64}"
    assert list(checks.images_are_pinned(broken(SERVER, f"{CONTAINER} image", image))) == []
