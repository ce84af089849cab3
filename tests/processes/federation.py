"""A coordinator and its daemons over loopback, and their runs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, Self

from google.protobuf.message import Message

from fl_ops.admin.calls import AdminCalls, Response
from fl_ops.admin.client import AdminClient
from fl_ops.admin.settings import Certificates, Connection
from fl_ops.errors import Refused
from protos.fl.v1 import admin_pb2
from protos.run_file import parse_run
from tests.processes.certificates import Pki, server_section
from tests.processes.planted import check_shown
from tests.processes.process import Process, Workspace, eventually, write_toml
from tests.skipping import suited

TASK = "tiny_task:Tiny"
TASKS = [TASK, "tests.processes.tiny_task:Tiny", "quadratic_task:Quadratic"]
"""Tasks of a coordinator's `tasks` setting."""


class Reachable(Protocol):
    """A server that daemons can call."""

    @property
    def address(self) -> str:
        """host:port."""
        ...


class CheckedCalls(AdminCalls):
    """Calls whose replies are searched for secrets."""

    def call(self, request: Message, response: type[Response], seconds: float = 0.0) -> Response:
        reply = super().call(request, response, seconds)
        check_shown(reply.SerializeToString(), f"the {response.__name__}")
        return reply


class Coordinator(Process):
    """A coordinator; it keeps its ports after a restart."""

    def __init__(
        self,
        workspace: Workspace,
        name: str = "server",
        settings: Mapping[str, Any] | None = None,
        path: Sequence[Path] = (),
    ) -> None:
        super().__init__(workspace, name, "fl_server", path)
        self.settings: dict[str, Any] = {
            "state_dir": str(self.folder / f"{name}-state"),
            "listen": "127.0.0.1:0",
            "admin_listen": "127.0.0.1:0",
            "metrics_listen": "127.0.0.1:0",
            "insecure": True,
            "log": "json",
            "tasks": TASKS,
            "limits": {"reattach_grace_s": 20.0},
            **(settings or {}),
        }
        write_toml(self.config, self.settings)

    def serve(self) -> Self:
        """Start it and wait until it serves."""
        before = len(self.events("serving"))  # a process that a test started without this may have served, too
        self.start()
        serving = self.logged("serving", before + 1)
        self.settings.update({name: address for name, address in serving.items() if name in self.settings})
        write_toml(self.config, self.settings)
        return self

    @property
    def address(self) -> str:
        """host:port for clients."""
        return str(self.settings["listen"])

    def admin(self, certificates: Certificates | None = None) -> AdminClient:
        """A connection to the admin port; a context manager."""
        return AdminClient(Connection(str(self.settings["admin_listen"]), certificates), calls=CheckedCalls)

    def create(self, name: str, **sections: Any) -> str:
        """Create a run; returns its id."""
        with self.admin() as admin:
            return admin.runs.create_run(run_spec(name, **sections)).run.run_id

    def run(self, run_id: str) -> admin_pb2.RunStatus:
        """Status of a run."""
        with self.admin() as admin:
            return admin.runs.get_run(run_id, 0).run

    def rounds(self, run_id: str) -> list[admin_pb2.RoundSummary]:
        """Its committed rounds."""
        with self.admin() as admin:
            return list(admin.runs.get_run(run_id).rounds)

    def client(self, client_id: str) -> admin_pb2.ClientStatus:
        """Status of a client; empty when it is unknown."""
        with self.admin() as admin:
            known = {client.client_id: client for client in admin.clients.list_clients()}
        return known.get(client_id, admin_pb2.ClientStatus())

    def until_present(self, *client_ids: str) -> None:
        """Wait until each of these clients has an open stream."""
        with self.admin() as admin:  # one connection for all probes

            def probe() -> bool:
                return present(admin).issuperset(client_ids)

            eventually(probe, f"{', '.join(client_ids)}: present")

    def until(self, run_id: str, holds: Callable[[admin_pb2.RunStatus], Any], what: str) -> admin_pb2.RunStatus:
        """Wait until the condition holds; returns the run's status."""
        with self.admin() as admin:  # one connection for all probes

            def probe() -> admin_pb2.RunStatus | None:
                status = admin.runs.get_run(run_id, 0).run
                return status if holds(status) else None

            return eventually(probe, f"run {run_id}: {what}")

    def ended(self, run_id: str) -> admin_pb2.RunStatus:
        """Wait until the run has ended, in any state. After a restart its code may have to be loaded first."""
        loading = "not loaded: its code is being loaded"
        return self.until(run_id, lambda run: run.HasField("ended") and run.reason != loading, "it ends")

    def completed(self, run_id: str) -> admin_pb2.RunStatus:
        """Wait until the run has completed. Fails if it ended in another state."""
        run = self.ended(run_id)
        assert run.state == admin_pb2.RUN_STATE_COMPLETED, f"{run_id} ended otherwise: {run.reason}"
        return run

    def digests(self, run_id: str) -> list[str]:
        """Wait until the run has completed; returns the digest of the model after each round."""
        self.completed(run_id)
        return [summary.model_digest for summary in self.rounds(run_id)]

    def history(self, subject: str) -> list[str]:
        """Names of the events of a run or client, the oldest first."""
        with self.admin() as admin:
            return [entry.event for entry in admin.history.list_history(subject, 0)]


class SecureCoordinator(Coordinator):
    """A coordinator that requires certificates; its operator is alice."""

    def __init__(
        self,
        workspace: Workspace,
        pki: Pki,
        settings: Mapping[str, Any] | None = None,
        name: str = "server",
        path: Sequence[Path] = (),
    ) -> None:
        tls = server_section(pki.issue("server", "coordinator"))
        self._alice = pki.issue("admin", "alice")
        super().__init__(workspace, name, {"insecure": False, "tls": tls, **(settings or {})}, path)

    def admin(self, certificates: Certificates | None = None) -> AdminClient:
        return super().admin(certificates or self._alice)


class Daemon(Process):
    """A client daemon."""

    def __init__(
        self, workspace: Workspace, server: Reachable, client_id: str, path: Sequence[Path] = (), **settings: Any
    ) -> None:
        super().__init__(workspace, settings.pop("process", client_id), "fl_client", path)
        self.client_id = client_id
        self.hold = self.folder / f"{client_id}.hold"
        options = {"hold": str(self.hold), **settings.pop("options", {})}
        self.settings: dict[str, Any] = {
            "client_id": client_id,
            "server": server.address,
            "state_dir": str(self.folder / f"{self.name}-state"),
            "insecure": True,
            "log": "json",
            "task": {"name": TASK, "options": options},
            **settings,
        }
        self.configure()

    def configure(self, **settings: Any) -> None:
        """Change these settings for the next start."""
        self.settings.update(settings)
        write_toml(self.config, self.settings)


class Fleet:
    """A coordinator and its daemons, each with its own shard."""

    def __init__(self, workspace: Workspace, size: int, **settings: Any) -> None:
        self.workspace = workspace
        self.server = Coordinator(workspace, settings=settings).serve()
        self.daemons = {f"edge-{index}": self.daemon(index, size).start() for index in range(size)}
        self.until_all_present()

    def daemon(self, index: int, size: int) -> Daemon:
        """Create a daemon without starting it."""
        shard = {"partition": {"method": "iid", "clients": size, "seed": 1}, "index": index}
        return Daemon(self.workspace, self.server, f"edge-{index}", shard=shard)

    def __getitem__(self, name: str) -> Daemon:
        return self.daemons[name]

    def half_delivered(self, run: str, **sections: Any) -> tuple[Daemon, Daemon]:
        """Create a run and stop in its first round: one daemon has delivered, the other is training.

        Returns (the first, the second, which trains until its `hold` file is removed).
        """
        self.hold()
        self.server.create(run, **sections)
        cohort = self.server.until(run, lambda status: len(status.cohort) == 2, "it draws two").cohort
        quick, slow = (self[name] for name in cohort)
        for daemon in self.daemons.values():
            if daemon is not slow:
                daemon.hold.unlink()
        self.server.until(run, lambda status: status.admitted == 1, "one has delivered")
        slow.logged("assignment", run=run, round=0)
        return quick, slow

    def killed_in_mid_round(self, run: str, *lost: str) -> list[str]:
        """Kill the coordinator with one of two updates admitted, and start it without these parts of its state.

        The admitted update counts, and its client does not train again. Returns the digests of the run's models.
        """
        quick, slow = self.half_delivered(run)
        server = self.server
        server.kill()
        for part in lost:
            shutil.rmtree(server.folder / "server-state" / part)
        server.serve()
        status = server.run(run)
        assert (status.rounds_done, status.admitted) == (0, 1)
        slow.hold.unlink()
        digests = server.digests(run)
        assert len(quick.events("trained", run=run, round=0)) == 1
        return digests

    def hold(self) -> None:
        """Make every training step of every daemon wait."""
        for daemon in self.daemons.values():
            daemon.hold.touch()

    def release(self) -> None:
        """Let training continue."""
        for daemon in self.daemons.values():
            daemon.hold.unlink(missing_ok=True)

    @contextmanager
    def lent(self) -> Iterator[Self]:
        """The fleet for one test. Afterwards no daemon trains on beside the tests that follow."""
        self.reset()
        yield self
        if self.server.exit_code is None:
            with self.server.admin() as admin:
                end_runs(admin)
        self.release()

    def reset(self) -> None:
        """Undo the effects of a test: all daemons run and are idle, no run is open, no client is banned or drained."""
        self.release()
        if self.server.exit_code is not None:
            self.server.serve()
        with self.server.admin() as admin:
            end_runs(admin)
            for client in admin.clients.list_clients():
                if client.client_id not in self.daemons:
                    admin.clients.forget_client(client.client_id)
                elif client.banned:
                    admin.call(admin_pb2.UnbanClientRequest(client_id=client.client_id), admin_pb2.UnbanClientResponse)
                elif client.draining:
                    admin.call(
                        admin_pb2.DrainClientRequest(client_id=client.client_id, undo=True),
                        admin_pb2.DrainClientResponse,
                    )
            connected = present(admin)
        away = [name for name, daemon in self.daemons.items() if daemon.exit_code is not None or name not in connected]
        for name in away:
            self[name].clean_up()
            self[name].start()
        if away:
            self.until_all_present()

    def until_all_present(self) -> None:
        """Wait until every daemon is connected."""
        self.server.until_present(*self.daemons)


def end_runs(admin: AdminClient) -> None:
    """Stop the runs that a test has left open."""
    for run in admin.runs.list_runs():
        if not run.HasField("ended"):
            try:
                admin.runs.stop_run(run.run_id, "its test is over")
            except Refused:
                if not admin.runs.get_run(run.run_id, 0).run.HasField("ended"):  # it may have ended meanwhile
                    raise


def present(admin: AdminClient) -> set[str]:
    """The clients with an open stream."""
    return {client.client_id for client in admin.clients.list_clients() if client.state == PRESENT}


PRESENT = admin_pb2.CLIENT_STATE_PRESENT

DEFAULTS: dict[str, Any] = {
    "task": {"name": TASK},
    "algorithm": {"name": "fedcm", "parameters": {"alpha": 0.2}},
    "local": {"learning_rate": 0.2, "epochs": 1, "batch_size": 16},
    "round": {"clients_per_round": 2, "min_clients": 3, "deadline_s": 600.0},
    "stop": {"rounds": 3},
    "seed": 7,
}


def run_spec(name: str, **sections: Any) -> admin_pb2.RunSpec:
    """A run of a few short rounds. A section's keys replace the defaults (None removes one), an algorithm all."""
    merged: dict[str, Any] = {"name": name, **DEFAULTS}
    for key, value in sections.items():
        whole = key == "algorithm" or not isinstance(value, dict)
        both = {} if whole else {**DEFAULTS.get(key, {}), **value}
        merged[key] = value if whole else {name: each for name, each in both.items() if each is not None}
    return parse_run(suited(merged, merged.get("population", 0)))
