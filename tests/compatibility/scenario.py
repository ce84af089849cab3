"""Two runs that are stopped in the middle of a round, and how they continue from what is on disk.

Each run has three daemons of its own. At the stop two rounds of it are committed. In the open round one update is
accepted and lies in the spool, one is half uploaded, and one client is still training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.proxy import Proxy
from tests.processes.federation import Coordinator, Daemon
from tests.processes.process import Workspace, eventually

HERE = Path(__file__).parent
TASK = "ballast_task:Ballast"
CLIENTS = 3
ROUNDS = 5
OPEN_ROUND = 2
CHUNK_BYTES = 64 << 10
ALGORITHMS: Mapping[str, Mapping[str, Any]] = {
    "scaffold": {"name": "scaffold"},
    "fedcm": {"name": "fedcm", "parameters": {"alpha": 0.2}},
}
"""Run id -> algorithm; also the value of the daemons' label `run`."""


@dataclass
class Federation:
    """A coordinator and three daemons for each run, on the state directories of `workspace`.

    programs: root of the version that runs the coordinator and the daemons; None for this one.
    """

    workspace: Workspace
    programs: Path | None = None

    def __post_init__(self) -> None:
        path = [*([self.programs] if self.programs else []), HERE]
        limits = {"chunk_bytes": CHUNK_BYTES, "reattach_grace_s": 60.0}
        settings = {"tasks": [TASK], "limits": limits}
        self.server = Coordinator(self.workspace, settings=settings, path=path)
        self.server.forks = self.programs is None
        self.server.serve()
        self.daemons = {
            f"{run}-{index}": self._daemon(run, index, path) for run in ALGORITHMS for index in range(CLIENTS)
        }

    def _daemon(self, run: str, index: int, path: list[Path]) -> Daemon:
        name = f"{run}-{index}"
        shard = {"partition": {"method": "iid", "clients": CLIENTS, "seed": 1}, "index": index}
        task = {"name": TASK, "options": {"hold": str(self.workspace.folder / f"{name}.hold")}}
        daemon = Daemon(self.workspace, self.server, name, path, task=task, shard=shard, labels={"run": run})
        daemon.forks = self.programs is None
        return daemon

    def begin(self) -> None:
        """Create both runs and stop everything, by SIGKILL, in the middle of round `OPEN_ROUND`."""
        proxies = {run: Proxy(self.server.address) for run in ALGORITHMS}
        try:
            for run, proxy in proxies.items():
                self.daemons[f"{run}-1"].configure(server=proxy.address)
            for daemon in self.daemons.values():
                daemon.start()
            for run, algorithm in ALGORITHMS.items():
                self.server.create(run, **_sections(run, algorithm))
            self._reach_the_open_round()
            for run, proxy in proxies.items():
                self._half_upload(run, proxy)
            for process in self.workspace.processes:
                process.kill()
        finally:
            for proxy in proxies.values():
                proxy.close()

    def _reach_the_open_round(self) -> None:
        """Wait until every client trains for `OPEN_ROUND`. A paused run starts no further round."""
        for run in ALGORITHMS:
            with self.server.admin() as admin:
                self.server.until(
                    run, lambda status: status.rounds_done >= OPEN_ROUND - 1, "a round before the open one"
                )
                admin.pause_run(run)
            done = self.server.until(run, lambda status: not status.cohort, "it is paused between rounds").rounds_done
            assert done == OPEN_ROUND, f"{run}: expected {OPEN_ROUND} committed rounds, got {done}"
        for daemon in self.daemons.values():
            daemon.hold.touch()
        for run in ALGORITHMS:
            with self.server.admin() as admin:
                admin.resume_run(run)
        for daemon in self.daemons.values():
            daemon.logged("assignment", round=OPEN_ROUND)

    def _half_upload(self, run: str, proxy: Proxy) -> None:
        """Client 0 delivers; client 1 sends one chunk and half of the next; client 2 continues training."""
        first, second = self.daemons[f"{run}-0"], self.daemons[f"{run}-1"]
        first.hold.unlink()
        first.logged("submitted", round=OPEN_ROUND)
        trap = proxy.cut("up", 2, "inside", "hold")
        second.hold.unlink()
        assert trap.triggered.wait(60), f"{run}-1 sent no second chunk"
        spool = Path(self.server.settings["state_dir"]) / "spool" / f"run-{run}"
        eventually(lambda: any(spool.rglob("*.part")), "its first chunk is kept")

    def continue_runs(self) -> dict[str, list[str]]:
        """Start all daemons and wait for the ends; the model's digest after each round of each run."""
        for daemon in self.daemons.values():
            daemon.start()
        return {run: self.server.digests(run) for run in ALGORITHMS}


def _sections(run: str, algorithm: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "task": {"name": TASK},
        "algorithm": algorithm,
        "local": {"learning_rate": 0.125, "epochs": 1, "batch_size": 1},
        "round": {"clients_per_round": CLIENTS, "min_clients": CLIENTS, "deadline_s": 600.0},
        "stop": {"rounds": ROUNDS},
        "labels": {"run": run},
        "population": CLIENTS if run == "scaffold" else 0,
    }
