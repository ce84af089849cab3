"""Coordinators and workers as pods: each has a disk and ports of its own, and is found through a service.

As in k8s/overlays/production-ha a service leads to the coordinator that is ready, and workers share the address that
devices dial. What a roll-out does to a pod is done here with signals.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.processes.federation import Daemon, Fleet
from tests.processes.process import Process, Workspace, eventually
from tests.processes.relay import Relay, free_port
from tests.processes.standby import Candidate
from tests.processes.workers import Worker, free_address

PROBE_S = 5.0


def is_ready(address: str) -> bool:
    """Whether a pod gets connections: its readiness probe, as the manifests have it."""
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service="fl.v1.Coordinator")
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=PROBE_S)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


class Pods(Fleet):
    """Two coordinators, workers and daemons. `server` is the coordinator that leads."""

    def __init__(self, workspace: Workspace, size: int, workers: int, shared: Mapping[str, Any], **own: Any) -> None:
        """shared: settings of all coordinators. own: settings of all daemons."""
        self.workspace, self._shared, self._own, self._names = workspace, shared, own, count()
        self._serve = free_address()
        self.coordinators: list[Candidate] = []
        self.workers: list[Worker] = []
        self.services = {port: Relay(lambda port=port: self._leads_to(port)) for port in ("listen", "workers")}  # type: ignore[misc]
        self.server: Candidate = self.coordinator().serve()
        self.coordinator().stand_by()
        for _ in range(workers):
            self.worker().serve()
        self.daemons = {f"edge-{index}": self.daemon(index, size).start() for index in range(size)}
        self.until_all_present()

    def coordinator(self) -> Candidate:
        """Create a coordinator without starting it."""
        listening = {"listen": free_address(), "serve": self._serve}
        health = f"127.0.0.1:{free_port()}"
        settings = {**self._shared, "workers": listening, "health_listen": health}
        self.coordinators.append(Candidate(self.workspace, f"coordinator-{next(self._names)}", settings))
        return self.coordinators[-1]

    def worker(self) -> Worker:
        """Create a worker without starting it."""
        name = f"worker-{next(self._names)}"
        known = {"coordinator": self.services["workers"].address, "serve": self._serve}
        settings = {
            "state_dir": str(self.workspace.folder / f"{name}-state"),
            "health_listen": f"127.0.0.1:{free_port()}",
            "metrics_listen": f"127.0.0.1:{free_port()}",
            "workers": known,
        }
        self.workers.append(Worker(self.workspace, self.coordinators[0], name, settings))
        return self.workers[-1]

    def daemon(self, index: int, size: int) -> Daemon:
        """Create a daemon that knows the service, without starting it."""
        shard = {"partition": {"method": "iid", "clients": size, "seed": 1}, "index": index}
        return Daemon(self.workspace, self.services["listen"], f"edge-{index}", shard=shard, **self._own)

    @property
    def addresses(self) -> tuple[str, str]:
        """Where clients call: for all but transfers, and for those."""
        return self.services["listen"].address, self._serve

    def ready(self) -> Candidate | None:
        """The coordinator that is ready."""
        running = (each for each in self.coordinators if each.exit_code is None)
        return next((each for each in running if is_ready(each.settings["health_listen"])), None)

    def end(self, process: Process, meanwhile: Callable[[], None] = lambda: None) -> None:
        """End a pod as a roll-out does, and forget it. meanwhile: called between the signal and the end."""
        process.signal(signal.SIGTERM)
        meanwhile()
        code = process.wait()
        assert code == 0, f"after SIGTERM {process.name} ended with {code}: {process.errors()}"
        for pods in (self.coordinators, self.workers):
            if process in pods:
                pods.remove(process)  # type: ignore[arg-type]

    def until_led(self) -> None:
        """Wait until a coordinator is ready."""
        self.server = eventually(self.ready, "a coordinator is ready")

    def _leads_to(self, port: str) -> str:
        leader = self.ready()
        if leader is None:
            return ""
        return str(leader.settings["workers"]["listen"] if port == "workers" else leader.address)

    def close(self) -> None:
        """Close the services. The workspace ends the processes."""
        for service in self.services.values():
            service.__exit__()
