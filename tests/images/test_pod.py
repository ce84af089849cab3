"""The base's pod under podman: the manifest's settings, volumes and limits with the built image."""

from __future__ import annotations

import os
import socket
import urllib.request
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fl_ops.admin.client import AdminClient
from fl_ops.admin.settings import Certificates, Connection
from tests.images.containers import USER
from tests.images.podman import Podman
from tests.k8s.manifests import build, needs_kubectl
from tests.processes.process import eventually, run_fl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600), needs_kubectl]

POD = "fl-server-0"
CONTAINER = f"{POD}-fl-server"


def only(objects: Iterable[dict[str, Any]], kind: str) -> dict[str, Any]:
    """The one object of a kind."""
    (found,) = [each for each in objects if each["kind"] == kind]
    return found


def as_pod(objects: list[dict[str, Any]], ports: dict[str, int], tls: Path) -> list[dict[str, Any]]:
    """The StatefulSet's first pod and its volume, with `ports` of this machine's loopback for the container's ports.

    Podman's own option sets the owner of the volume; in a cluster `fsGroup` does. The folder `tls` is each Secret
    as the kubelet lays it out: podman 4.3 mounts a Secret's data without decoding them.
    """
    template = only(objects, "StatefulSet")["spec"]["template"]
    (claim,) = only(objects, "StatefulSet")["spec"]["volumeClaimTemplates"]
    name = claim["metadata"]["name"]
    owner = {f"volume.podman.io/{part}": str(USER) for part in ("uid", "gid")}
    claim |= {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name, "annotations": owner}}
    template["spec"]["volumes"].append({"name": name, "persistentVolumeClaim": {"claimName": name}})
    (container,) = template["spec"]["containers"]
    for port in container["ports"]:
        port |= {"hostIP": "127.0.0.1", "hostPort": ports[port["name"]]}
    for volume in template["spec"]["volumes"]:
        if volume.pop("secret", None):
            volume["hostPath"] = {"path": str(tls), "type": "Directory"}
    return [
        only(objects, "ConfigMap"),
        {
            **claim,
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "annotations": owner},
        },
        {"apiVersion": "v1", "kind": "Pod", **template, "metadata": {**template["metadata"], "name": POD}},
    ]


def lay_out(pki: Path, folder: Path) -> Path:
    """The Secret that the pod refers to, with the files of cert-manager and the modes of the manifest."""
    files = {
        "ca.crt": "ca.crt",
        "client-ca.crt": "ca.crt",
        "tls.crt": "server-coordinator.crt",
        "tls.key": "server-coordinator.key",
    }
    folder.mkdir()
    for name, source in files.items():
        (folder / name).write_bytes((pki / source).read_bytes())
        (folder / name).chmod(0o440)
        os.chown(folder / name, 0, USER)
    return folder


def free_ports(names: list[str]) -> dict[str, int]:
    """A free port for each name, all different."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in names]
    ports = {name: each.getsockname()[1] for name, each in zip(names, held, strict=True)}
    for each in held:
        each.close()
    return ports


@pytest.fixture(scope="module")
def ports() -> dict[str, int]:
    """Where the pod's ports are reached, by name."""
    return free_ports(["grpc", "admin", "metrics", "health"])


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, and the certificates of a coordinator and an operator."""
    folder = tmp_path_factory.mktemp("pod")
    for arguments in (("init",), ("issue", "server", "--host", "127.0.0.1"), ("issue", "admin", "alice")):
        made = run_fl("ca", *arguments, "--dir", "pki", folder=folder)
        assert made.returncode == 0, made.stderr
    return folder / "pki"


@pytest.fixture(scope="module")
def pod(podman: Podman, tmp_path_factory: pytest.TempPathFactory, ports: dict[str, int], pki: Path) -> Iterator[Path]:
    """The pod, running; it and its volume are gone afterwards."""
    folder = tmp_path_factory.mktemp("played")
    file = folder / "pod.yaml"
    file.write_text(yaml.safe_dump_all(as_pod(build("k8s/base"), ports, lay_out(pki, folder / "tls"))))
    try:
        podman("kube", "play", str(file))
        eventually(lambda: serving(ports, "fl.v1.Coordinator"), "it serves")
        yield file
    finally:
        podman.attempt("pod", "rm", "--force", "--time", "0", POD)
        podman.attempt("volume", "rm", "--all", "--force")


def serving(ports: dict[str, int], service: str) -> bool:
    """Whether the health service reports a service as serving, asked like a kubelet."""
    with grpc.insecure_channel(f"127.0.0.1:{ports['health']}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answered = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5).status
        except grpc.RpcError:
            return False
    return bool(answered == health_pb2.HealthCheckResponse.SERVING)


def probes(container: dict[str, Any]) -> set[str]:
    """The services that the pod's probes ask for."""
    return {container[name]["grpc"]["service"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}


def test_the_pods_probes_are_answered(podman: Podman, pod: Path, ports: dict[str, int]) -> None:
    """Every probe of the manifest finds the coordinator serving."""
    (container,) = only(yaml.safe_load_all(pod.read_text()), "Pod")["spec"]["containers"]
    for service in probes(container):
        eventually(partial(serving, ports, service), f"{service} is served")


def test_operators_and_prometheus_reach_it(pod: Path, ports: dict[str, int], pki: Path) -> None:
    """mTLS with the Secret's certificate on the admin port; plain HTTP on the metrics port."""
    certificates = Certificates(pki / "ca.crt", pki / "admin-alice.crt", pki / "admin-alice.key")
    with AdminClient(Connection(f"127.0.0.1:{ports['admin']}", certificates)) as admin:
        assert list(admin.runs.list_runs()) == []
    with urllib.request.urlopen(f"http://127.0.0.1:{ports['metrics']}/metrics", timeout=30) as page:
        assert b"fl_build_info" in page.read()


def test_the_manifests_limits_hold(podman: Podman, pod: Path, ports: dict[str, int]) -> None:
    """No root user, no capability, no privilege escalation, a read-only root, as in the manifest."""
    status = podman("exec", CONTAINER, "cat", "/proc/1/status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Uid"].split() == [str(USER)] * 4
    assert (int(fields["CapEff"], 16), fields["NoNewPrivs"]) == (0, "1")
    assert "Read-only file system" in podman.attempt("exec", CONTAINER, "touch", "/opt/impetus/x").stderr


def test_it_ends_by_itself_when_the_pod_is_stopped(podman: Podman, pod: Path, ports: dict[str, int]) -> None:
    """SIGTERM by the platform: exit code 0 and not 137, within the manifest's grace."""
    grace = only(yaml.safe_load_all(pod.read_text()), "Pod")["spec"]["terminationGracePeriodSeconds"]
    podman("pod", "stop", "--time", str(grace), POD)
    assert podman("inspect", "--format", "{{.State.ExitCode}}", CONTAINER).strip() == "0"
    podman("pod", "start", POD)
    eventually(lambda: serving(ports, "fl.v1.Coordinator"), "it serves again")
