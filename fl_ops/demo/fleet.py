"""Starts one coordinator and its daemons on free loopback ports, and waits until all are present."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fl_ops.admin.client import AdminClient
from fl_ops.admin.settings import Connection
from fl_ops.demo.partitioning import PartitionedData, partition
from fl_ops.demo.processes import Child, Processes
from fl_ops.demo.settings import DemoSettings
from fl_ops.errors import Refused
from protos.fl.v1 import admin_pb2

START_SECONDS = 180.0
"""Time for the coordinator to start, and then for all daemons; loading torch from a slow disk takes long."""
_POLL_SECONDS = 0.05

CHECKED = ("client-0", "client-1")
"""The honest clients of the run with faulty ones, which selects them by a label."""

OnProgress = Callable[[str], None]
"""Shows a line of progress."""


class Fleet:
    """A coordinator and daemons, each in its own process, with their state in `folder`."""

    def __init__(self, settings: DemoSettings, folder: Path, processes: Processes) -> None:
        self._settings = settings
        self._folder = folder
        self._processes = processes
        self.admin = ""
        """The coordinator's admin address, once it serves."""
        self._listen = ""
        self._coordinator: Child | None = None

    def start(self, on_progress: OnProgress) -> PartitionedData:
        """Start all processes and wait until every daemon is present. Raises OpsError if one is missing."""
        on_progress("starting the coordinator")
        self._coordinator = self._start_coordinator("server")
        # At the same time as the coordinator starts: both take seconds to load torch.
        data = partition(self._settings, self._folder / "partition.json")
        addresses = self._await_addresses(self._coordinator)
        self.admin, self._listen = addresses["admin_listen"], addresses["listen"]
        for index in range(self._settings.clients):
            self._start_daemon(f"client-{index}", index, addresses["listen"])
        with self.connect() as client:
            self._await_daemons(client, on_progress)
        return data

    def connect(self) -> AdminClient:
        """A client of the coordinator's admin port; a context manager."""
        return AdminClient(Connection(self.admin))

    def kill_coordinator(self) -> None:
        """End the coordinator by SIGKILL."""
        if self._coordinator is not None:
            self._processes.kill(self._coordinator)

    def restart_coordinator(self) -> None:
        """Start the coordinator with its state directory and its ports, and wait until it serves."""
        self._coordinator = self._start_coordinator("server-again")
        self._await_addresses(self._coordinator)

    def check(self) -> None:
        """Raises ChildEnded if a process has ended unexpectedly."""
        self._processes.check()

    def _start_coordinator(self, name: str) -> Child:
        config = {
            "state_dir": str(self._folder / "server"),
            "listen": self._listen or "127.0.0.1:0",
            "admin_listen": self.admin or "127.0.0.1:0",
            "metrics_listen": "",
            "insecure": True,
            "log": "json",
            # A name without a colon is a built-in task or an entry point, which the coordinator always allows.
            "tasks": [self._settings.task] if ":" in self._settings.task else [],
            "algorithms": self._settings.own_algorithms,
            **({"task_options": {self._settings.task: self._settings.options}} if self._settings.options else {}),
        }
        return self._processes.start(name, "fl_server", self._write(name, config))

    def start_faulty(self, name: str) -> None:
        """Start a daemon of `faulty_client`."""
        self._start_daemon(name, 0, self._listen, "fl_ops.demo.faulty_client")

    def _start_daemon(self, name: str, index: int, server: str, program: str = "fl_client") -> None:
        config = {
            "client_id": name,
            "server": server,
            "state_dir": str(self._folder / name),
            "insecure": True,
            "log": "json",
            # A GPU is not faster for eight small models, and a CPU gives the same bits on every machine.
            "device": "cpu",
            "labels": {"demo": "checked" if name in CHECKED or program != "fl_client" else "usual"},
            "task": {"name": self._settings.task, "options": self._settings.options},
            "algorithms": self._settings.own_algorithms,
            "shard": {"file": str(self._folder / "partition.json"), "index": index},
        }
        self._processes.start(name, program, self._write(name, config))

    def _write(self, name: str, config: dict[str, Any]) -> Path:
        path = self._folder / f"{name}.toml"
        path.write_text("".join(f"{key} = {_toml(value)}\n" for key, value in config.items()), encoding="utf-8")
        return path

    def _await_addresses(self, coordinator: Child) -> dict[str, str]:
        """The coordinator's addresses, from its log: it listens on free ports."""
        ends = time.monotonic() + START_SECONDS
        while time.monotonic() < ends:
            self._processes.check()
            for line in coordinator.log.read_text(encoding="utf-8").splitlines(keepends=True):
                if line.endswith("\n") and '"serving"' in line:
                    addresses: dict[str, str] = json.loads(line)
                    return addresses
            time.sleep(_POLL_SECONDS)
        raise Refused(f"the coordinator did not serve within {START_SECONDS:g} s; its log is {coordinator.log}")

    def _await_daemons(self, client: AdminClient, on_progress: OnProgress) -> None:
        wanted, before, ends = self._settings.clients, -1, time.monotonic() + START_SECONDS
        while time.monotonic() < ends:
            self._processes.check()
            present = sum(row.state == admin_pb2.CLIENT_STATE_PRESENT for row in client.clients.list_clients())
            if present != before:
                on_progress(f"{present} of {wanted} daemons are present")
            if present == wanted:
                return
            before = present
            time.sleep(_POLL_SECONDS)
        raise Refused(f"only {before} of {wanted} daemons are present after {START_SECONDS:g} s; see their logs")


def _toml(value: Any) -> str:
    """A value in TOML. JSON strings are valid TOML strings."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(member)}" for key, member in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)
