"""One coordinator and four daemons as real processes, with a proxy before each daemon. All seeds share them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from fl_common.settings import split_address
from protos.fl.v1 import admin_pb2
from tests.chaos.jobs import JOBS, Job
from tests.chaos.points import KillOrders, order_path
from tests.chaos.proxy import Proxy
from tests.processes.federation import Coordinator, Daemon, Fleet
from tests.processes.process import Workspace, write_toml

DAEMONS = 4
GRACE_S = 60.0
"""A daemon that reconnects within this time is not lost. It is longer than a start takes on a busy machine."""
CHUNK_BYTES = 64 << 10
STEP_S = 0.06
"""Duration of a training step: a round must be long enough for a fault."""


class KillableCoordinator(Coordinator):
    """A coordinator that kills itself at a chosen point."""

    def __init__(self, workspace: Workspace, settings: dict[str, Any]) -> None:
        super().__init__(workspace, settings=settings)
        self._module = "tests.chaos.server"
        self.orders = KillOrders(order_path(self.config))
        self.times_started = 0
        """How often it was started."""
        self.new_disk = False
        """Whether each start is on a new disk, but for the ledger. That needs an object store."""

    def serve(self) -> Self:
        """Start it and wait until it serves. The log of earlier starts may have been truncated."""
        self._starts = len(self.events("serving"))
        for name in ("spool", "checkpoints") if self.new_disk else ():
            shutil.rmtree(Path(self.settings["state_dir"]) / name, ignore_errors=True)
        super().serve()
        self.times_started += 1
        return self


class ChaosCluster(Fleet):
    """The federation that runs all seeds, one after the other."""

    def __init__(self, workspace: Workspace, settings: Mapping[str, Any] | None = None) -> None:
        """settings: of the coordinator, beside its limits."""
        self.workspace = workspace
        self.job, self.run_id = JOBS["fedcm"], ""
        limits = {"reattach_grace_s": GRACE_S, "chunk_bytes": CHUNK_BYTES}
        self.server: KillableCoordinator = KillableCoordinator(
            workspace, {"limits": limits, **(settings or {})}
        ).serve()
        self.proxies: dict[str, Proxy] = {}
        self.daemons = {}
        self._undisturbed: dict[str, list[str]] = {}
        for index in range(DAEMONS):
            daemon = self.daemon(index, DAEMONS).start()
            self.daemons[daemon.client_id] = daemon
        self.until_all_present()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the proxies. The workspace ends the processes."""
        for proxy in self.proxies.values():
            proxy.close()

    def daemon(self, index: int, size: int) -> Daemon:
        """Create a daemon behind its own proxy, without starting it."""
        shard = {"partition": {"method": "iid", "clients": size, "seed": 1}, "index": index}
        options = {"model": "broad", "step_s": STEP_S}
        daemon = Daemon(self.workspace, self.server, f"edge-{index}", shard=shard, options=options)
        daemon._module = "tests.chaos.daemon"
        proxy = self.proxies[daemon.client_id] = Proxy(lambda: split_address(self.server.address))
        daemon.settings["server"] = proxy.address
        write_toml(daemon.config, daemon.settings)
        return daemon

    def reset(self) -> None:
        """Undo the effects of a seed and empty the logs."""
        self.server.orders.cancel()
        for proxy in self.proxies.values():
            proxy.pass_on()
        super().reset()
        for process in self.workspace.processes:
            for path in (process._out, process._err):
                os.truncate(path, 0)

    def begin(self, job: Job, name: str, **sections: Any) -> str:
        """Create a run of a job and make it the current run."""
        self.job, self.run_id = job, self.server.create(name, **job.with_sections(**sections))
        return self.run_id

    def undisturbed(self, job: Job) -> list[str]:
        """Digests of the job's rounds without faults, for as many rounds as any seed needs."""
        if job.name not in self._undisturbed:
            self.reset()
            self._undisturbed[job.name] = self.server.digests(self.begin(job, f"undisturbed-{job.name}"))
        return self._undisturbed[job.name]

    def until_round(self, round_: int) -> admin_pb2.RunStatus:
        """Wait until this or a later round is under way, or the run has ended; returns the run's status."""
        return self.server.until(
            self.run_id,
            lambda run: run.HasField("ended") or run.rounds_done > round_ or (run.rounds_done == round_ and run.cohort),
            f"round {round_} is under way",
        )

    def over(self) -> bool:
        """Whether the run has ended."""
        return self.server.run(self.run_id).HasField("ended")
