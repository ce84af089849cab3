"""A coordinator and its daemons over loopback, and the runs they do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from fl_ops.admin_client import AdminClient
from fl_ops.run_file import parse_run
from fl_ops.settings import Certificates, Connection
from protos.fl.v1 import admin_pb2
from tests.integration.processes import Place, Process, eventually, write_toml

TASK = "tiny_task:Tiny"
TASKS = [TASK, "tests.integration.tiny_task:Tiny", "quadratic_task:Quadratic"]
"""What a coordinator under test may load beside the tasks that come along."""


class Coordinator(Process):
    """A coordinator; it keeps its ports when it is started again."""

    def __init__(self, place: Place, name: str = "server", settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(place, name, "fl_server")
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
        self._starts = 0
        write_toml(self.config, self.settings)

    def serve(self) -> Self:
        """Start it and wait until it serves."""
        self.start()
        self._starts += 1
        serving = self.logged("serving", self._starts)
        self.settings.update({name: address for name, address in serving.items() if name in self.settings})
        write_toml(self.config, self.settings)
        return self

    @property
    def address(self) -> str:
        """Where clients call."""
        return str(self.settings["listen"])

    def admin(self, certificates: Certificates | None = None) -> AdminClient:
        """A connection to the admin port; use it in a with block."""
        return AdminClient(Connection(str(self.settings["admin_listen"]), certificates))

    def create(self, name: str, **sections: Any) -> str:
        """A new run; its id."""
        with self.admin() as admin:
            return admin.create_run(run_spec(name, **sections)).run_id

    def run(self, run_id: str) -> admin_pb2.RunStatus:
        """How the run stands."""
        with self.admin() as admin:
            return admin.get_run(run_id).run

    def rounds(self, run_id: str) -> list[admin_pb2.RoundSummary]:
        """Its committed rounds."""
        with self.admin() as admin:
            return list(admin.get_run(run_id).rounds)

    def client(self, client_id: str) -> admin_pb2.ClientStatus:
        """What is known of a client; empty when nothing is."""
        with self.admin() as admin:
            known = {client.client_id: client for client in admin.list_clients()}
        return known.get(client_id, admin_pb2.ClientStatus())

    def until(self, run_id: str, holds: Callable[[admin_pb2.RunStatus], Any], what: str) -> admin_pb2.RunStatus:
        """The run's status once something holds of it."""

        def probe() -> admin_pb2.RunStatus | None:
            status = self.run(run_id)
            return status if holds(status) else None

        return eventually(probe, f"run {run_id}: {what}")

    def ended(self, run_id: str) -> admin_pb2.RunStatus:
        """The run once it is over, however it ended."""
        return self.until(run_id, lambda run: run.HasField("ended"), "it ends")

    def completed(self, run_id: str) -> admin_pb2.RunStatus:
        """The run once it is over; it must have come to its proper end."""
        run = self.ended(run_id)
        assert run.state == admin_pb2.RUN_STATE_COMPLETED, f"{run_id} ended otherwise: {run.reason}"
        return run

    def digests(self, run_id: str) -> list[str]:
        """Digest of the model after each round, once the run has come to its proper end."""
        self.completed(run_id)
        return [summary.model_digest for summary in self.rounds(run_id)]

    def history(self, subject: str) -> list[str]:
        """The events about a run or client, the oldest first."""
        with self.admin() as admin:
            return [entry.event for entry in admin.list_history(subject, 0)]


class Daemon(Process):
    """A client daemon."""

    def __init__(
        self, place: Place, server: Coordinator, client_id: str, path: Sequence[Path] = (), **settings: Any
    ) -> None:
        super().__init__(place, settings.pop("process", client_id), "fl_client", path)
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
        write_toml(self.config, self.settings)


class Fleet:
    """A coordinator and its daemons, each with a share of its own."""

    def __init__(self, place: Place, size: int, **settings: Any) -> None:
        self.place = place
        self.server = Coordinator(place, settings=settings).serve()
        self.daemons = {f"edge-{index}": self.daemon(index, size).start() for index in range(size)}
        self.attend()

    def daemon(self, index: int, size: int) -> Daemon:
        """A daemon that is not started yet."""
        shard = {"partition": {"method": "iid", "clients": size, "seed": 1}, "index": index}
        return Daemon(self.place, self.server, f"edge-{index}", shard=shard)

    def __getitem__(self, name: str) -> Daemon:
        return self.daemons[name]

    def half_delivered(self, run: str, **sections: Any) -> tuple[Daemon, Daemon]:
        """Make a run in whose first round one daemon has delivered and the other is in mid-training.

        Returns (the one that has, the one that trains until its `hold` file is removed).
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

    def hold(self) -> None:
        """Every training step waits from now on, on every daemon."""
        for daemon in self.daemons.values():
            daemon.hold.touch()

    def release(self) -> None:
        """Training goes on."""
        for daemon in self.daemons.values():
            daemon.hold.unlink(missing_ok=True)

    def heal(self) -> None:
        """Whatever a test left behind: nobody held, everybody running, nothing under way, nobody banned or drained."""
        self.release()
        if self.server.exit_code is not None:
            self.server.serve()
        with self.server.admin() as admin:
            for run in admin.list_runs():
                if not run.HasField("ended"):
                    admin.stop_run(run.run_id, "its test is over")
            for client in admin.list_clients():
                if client.client_id not in self.daemons:
                    admin.forget_client(client.client_id)
                elif client.banned:
                    admin.unban_client(client.client_id)
                elif client.draining:
                    admin.drain_client(client.client_id, "", undo=True)
        for name, daemon in self.daemons.items():
            if daemon.exit_code is not None or self.server.client(name).state != PRESENT:
                daemon.clean_up()
                daemon.start()
        self.attend()

    def attend(self) -> None:
        """Wait until every daemon is there."""
        for name in self.daemons:
            eventually(lambda name=name: self.server.client(name).state == PRESENT, f"{name} attends")


PRESENT = admin_pb2.CLIENT_STATE_PRESENT

DEFAULTS: dict[str, Any] = {
    "task": {"name": TASK},
    "algorithm": {"name": "fedcm", "parameters": {"alpha": 0.2}},
    "local": {"learning_rate": 0.2, "epochs": 1, "batch_size": 16},
    "round": {"clients_per_round": 2, "min_clients": 3, "deadline_s": 600.0},
    "stop": {"rounds": 4},
    "seed": 7,
}


def run_spec(name: str, **sections: Any) -> admin_pb2.RunSpec:
    """A run of a few short rounds. A section's keys replace the defaults' (None: none), the algorithm's all at once."""
    merged: dict[str, Any] = {"name": name, **DEFAULTS}
    for key, value in sections.items():
        whole = key == "algorithm" or not isinstance(value, dict)
        both = {} if whole else {**DEFAULTS.get(key, {}), **value}
        merged[key] = value if whole else {name: each for name, each in both.items() if each is not None}
    return parse_run(merged)
