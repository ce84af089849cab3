"""The federation in the pictures: a real coordinator and real daemons over some minutes, with some faults.

Each program is a separate process on this machine, and all of them end with the block that started them.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.monitoring.alert_files import groups
from tests.monitoring.prometheus import Prometheus, Setup, prometheus
from tests.processes.federation import Coordinator, Daemon
from tests.processes.process import Workspace

TASK = "docs.source.dashboards.paced_digits:PacedDigits"
DAEMONS = 8
SCRAPE_S = 2
START_S = 400.0
"""Time limit for the start of the daemons, also on a busy machine."""
RUN, OTHER_RUN = "digits-fedcm", "fedavg-no-limit"
"""The run in Run detail, and a second run."""
PAUSES_S = (0.08, 0.12, 0.1, 0.15, 0.11, 0.08, 0.13, 0.28)
"""The pause in each daemon's training steps: the last device is much slower than the others."""
SWITCHED = (2, 7)
"""The daemons that are killed and come back."""
_SERVER = {
    "tasks": [TASK],
    "limits": {"reattach_grace_s": 3.0},
    "quarantine": {"after": 2, "first_s": 20.0},
}
_SECTIONS: dict[str, Any] = {
    "task": {"name": TASK},
    "local": {"epochs": 2, "batch_size": 20, "learning_rate": 0.1},
    "evaluation": {"every": 1, "clients_every": 2},
    "round": {"min_clients": None, "close": "goal", "deadline_s": 30.0},
}


@dataclass
class Federation:
    """The processes and their Prometheus."""

    server: Coordinator
    daemons: Sequence[Daemon]
    prometheus: Prometheus
    began: float

    def fault(self, index: int, name: str) -> Path:
        """Return the file that causes a daemon's fault while it exists."""
        return self.daemons[index].folder / f"{name}-{index}"


Happening = Callable[[Federation], object]


def _first_run(fleet: Federation) -> None:
    algorithm = {"name": "fedcm", "parameters": {"alpha": 0.3}}
    gate = {"clients_per_round": 4, "quorum": 2, "max_relative_norm": 6.0}
    fleet.server.create(RUN, **_with(algorithm, gate, rounds=150))


def _second_run(fleet: Federation) -> None:
    wait_for_all = {"clients_per_round": 2, "quorum": 1, "close": "cohort"}
    fleet.server.create(OTHER_RUN, **_with({"name": "fedavg"}, wait_for_all, rounds=120))


def _stop(fleet: Federation) -> None:
    with fleet.server.admin() as admin:
        admin.runs.stop_run(OTHER_RUN, "the other one is better")


def _with(algorithm: dict[str, Any], round: dict[str, Any], rounds: int) -> dict[str, Any]:
    return {**_SECTIONS, "algorithm": algorithm, "round": {**_SECTIONS["round"], **round}, "stop": {"rounds": rounds}}


def _switch_off(fleet: Federation) -> None:
    for device in SWITCHED:
        fleet.daemons[device].kill()


def _switch_on(fleet: Federation) -> None:
    for device in SWITCHED:
        fleet.daemons[device].start()


STORY: tuple[tuple[float, str, Happening], ...] = (
    (0, "a run with FedCM begins: four updates in a round, with a norm limit", _first_run),
    (35, "a second run begins, with FedAvg and no norm limit", _second_run),
    (30, "two devices are switched off", _switch_off),
    (25, "they are back", _switch_on),
    (15, "a device becomes faulty: its updates are far too long", lambda fleet: fleet.fault(5, "sick").touch()),
    (25, "it works again", lambda fleet: fleet.fault(5, "sick").unlink()),
    (20, "an operator stops the second run during a round", _stop),
    (20, "the coordinator is killed", lambda fleet: fleet.server.kill()),
    (4, "it is started again", lambda fleet: fleet.server.serve()),
    (25, "a camera is unplugged", lambda fleet: fleet.fault(0, "unplugged").touch()),
    (15, "and plugged in", lambda fleet: fleet.fault(0, "unplugged").unlink()),
    (25, "the pictures are drawn", lambda fleet: None),
)
"""The events: seconds after the previous event, description, action."""


@contextmanager
def federation(folder: Path) -> Iterator[Federation]:
    """Yield the running processes, with all files in a folder. Their Prometheus survives a kill of the coordinator."""
    with Workspace(folder) as workspace:
        server = Coordinator(workspace, settings=_SERVER).serve()
        ports = _free_ports(DAEMONS)
        daemons = [_daemon(workspace, server, index, port).start() for index, port in enumerate(ports)]
        for daemon in daemons:
            server.until_present(daemon.client_id)
        jobs = {
            "fl-server": [str(server.settings["metrics_listen"])],
            "fl-client": [f"127.0.0.1:{port}" for port in ports],
        }
        with prometheus(folder, Setup(jobs, groups(), interval=f"{SCRAPE_S}s")) as watching:
            yield Federation(server, daemons, watching, time.time())


def _daemon(workspace: Workspace, server: Coordinator, index: int, port: int) -> Daemon:
    shard = {"partition": {"method": "dirichlet", "clients": DAEMONS, "alpha": 0.3, "seed": 3}, "index": index}
    faults = {name: str(workspace.folder / f"{name}-{index}") for name in ("sick", "unplugged")}
    options = {"pause_s": PAUSES_S[index], "client_eval_fraction": 0.2, **faults}
    task = {"name": TASK, "options": options}
    return Daemon(workspace, server, f"edge-{index}", shard=shard, task=task, metrics_listen=f"127.0.0.1:{port}")


def _free_ports(count: int) -> list[int]:
    """Return free ports, reserved together so that they differ."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [bound.getsockname()[1] for bound in sockets]
    for bound in sockets:
        bound.close()
    return ports


def play(fleet: Federation, tell: Callable[[str], object]) -> None:
    """Execute the events at their times."""
    for pause_s, words, happen in STORY:
        time.sleep(pause_s)
        tell(f"{time.time() - fleet.began:4.0f} s: {words}")
        happen(fleet)
