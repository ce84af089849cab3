"""Faults of processes: death at a point or at a random moment, SIGSTOP, and loss of half of the daemons."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

from fl_ops.errors import OpsError
from protos.fl.v1 import admin_pb2
from tests.chaos.checks import ledger_of
from tests.chaos.cluster import DAEMONS, ChaosCluster
from tests.chaos.fault import DidNotHappen, Fault
from tests.chaos.points import AT_THE_END, EVERY_ROUND, NEW_EPOCH, Write, points
from tests.processes.federation import Daemon
from tests.processes.process import Process, eventually

FINAL_WRITES_S = 1.0
"""Longer than the last writes of a coordinator for an ended run take."""


@dataclass(frozen=True)
class Death:
    """The coordinator dies at the nth pass of a point and is restarted."""

    point: str
    nth: int = 1
    may_lose_update = False

    @property
    def name(self) -> str:
        return f"death {self.point}"

    def inject(self, cluster: ChaosCluster, run_id: str) -> None:
        run, server = cluster.server.run(run_id), cluster.server
        server.orders.kill_at(self.point, self.nth)
        # With a buffer updates of the next round may be here already, and files of a version in use are not removed.
        ahead = 2 if cluster.job.buffered else 1
        must_come = not run.HasField("ended") and run.rounds_done + ahead < run.spec.stop.rounds
        must_come = must_come and not (cluster.job.buffered and self.point in WHEN_UNUSED)
        try:
            eventually(lambda: server.exit_code is not None or _is_over(cluster), f"the coordinator dies {self.point}")
            _wait(FINAL_WRITES_S, server)
        finally:
            server.orders.cancel()
        if server.exit_code is None:
            assert not must_come or self.point in RARE_POINTS, f"the run has ended and never reached: {self.point}"
            raise DidNotHappen(f"the run was over before it reached: {self.point}")
        executed = server.orders.executed
        assert server.exit_code == -signal.SIGKILL, f"expected death by SIGKILL, got exit code {server.exit_code}"
        assert executed, f"the coordinator died, but not {self.point}"
        server.serve()


@dataclass(frozen=True)
class LostState:
    """A daemon loses a counted client state. The coordinator may die when it writes the new state epoch."""

    which: int
    """Index among the clients that counted in the first round."""
    point: str
    name: str
    may_lose_update = True
    waits = True
    jobs = ("scaffold",)

    def inject(self, cluster: ChaosCluster, run_id: str) -> None:
        cluster.until_round(1)
        with ledger_of(cluster) as ledger:
            counted = ledger.accepted(run_id, 0, 0) or []
        daemon = cluster.daemons[counted[self.which][0]]
        daemon.kill()
        for folder in ("states", "pending"):
            shutil.rmtree(Path(daemon.settings["state_dir"]) / folder, ignore_errors=True)
        daemon.start()
        if self.point:
            Death(self.point).inject(cluster, run_id)


@dataclass(frozen=True)
class Kill:
    """SIGKILL of the coordinator at a random moment, and again during the restart if `again_s` is not None."""

    after_s: float
    again_s: float | None = None
    may_lose_update = False

    @property
    def name(self) -> str:
        return "kill coordinator" if self.again_s is None else "kill coordinator twice"

    def inject(self, cluster: ChaosCluster, run_id: str) -> None:
        time.sleep(self.after_s)
        cluster.server.kill()
        if self.again_s is not None:
            cluster.server.start()
            time.sleep(self.again_s)
            cluster.server.kill()
        cluster.server.serve()


@dataclass(frozen=True)
class Terminate:
    """SIGTERM of the coordinator during a round: it drains, exits with 0, and is restarted."""

    after_s: float
    may_lose_update = False
    name = "terminate coordinator"

    def inject(self, cluster: ChaosCluster, run_id: str) -> None:
        time.sleep(self.after_s)
        code = cluster.server.terminate()
        assert code == 0, f"after SIGTERM the coordinator exited with {code}"
        cluster.server.serve()


@dataclass(frozen=True)
class Freeze:
    """SIGSTOP of the coordinator (daemon None) or of a daemon, then SIGCONT."""

    after_s: float
    for_s: float
    daemon: int | None = None
    may_lose_update = False

    @property
    def name(self) -> str:
        return "freeze coordinator" if self.daemon is None else "freeze daemon"

    def inject(self, cluster: ChaosCluster, run_id: str) -> None:
        process: Process = cluster.server if self.daemon is None else _daemon(cluster, self.daemon)
        time.sleep(self.after_s)
        process.signal(signal.SIGSTOP)
        try:
            time.sleep(self.for_s)
        finally:
            process.signal(signal.SIGCONT)


@dataclass(frozen=True)
class KillDaemons:
    """SIGKILL of daemons at a random moment. They restart at once, or after the round continued without them."""

    after_s: float
    daemons: tuple[int, ...]
    at_once: bool = True

    @property
    def may_lose_update(self) -> bool:
        return not self.at_once

    @property
    def name(self) -> str:
        if not self.at_once:
            return "half of the daemons gone"
        return "kill daemon" if len(self.daemons) == 1 else "kill half of the daemons"

    def inject(self, cluster: ChaosCluster, run_id: str) -> None:
        if not self.at_once:
            cluster.until_all_present()  # otherwise a restarted coordinator waits for them for reattach_grace_s
        time.sleep(self.after_s)
        daemons = [_daemon(cluster, index) for index in self.daemons]
        for daemon in daemons:
            daemon.kill()
        before = cluster.server.run(run_id)
        if not self.at_once and not before.HasField("ended"):
            closed = _position(before)
            eventually(lambda: _position(cluster.server.run(run_id)) != closed, "the run goes on without them")
        for daemon in daemons:
            daemon.start()
        if not self.at_once and before.HasField("ended"):
            raise DidNotHappen("the run was over before they were gone")


def _position(run: admin_pb2.RunStatus) -> tuple[object, ...]:
    """Values that change when a round is closed or retried."""
    return run.rounds_done, run.attempt, run.phase == "selecting"


def _daemon(cluster: ChaosCluster, index: int) -> Daemon:
    return list(cluster.daemons.values())[index]


def _is_over(cluster: ChaosCluster) -> bool:
    """Whether the run is over; False if the coordinator does not answer, because it is about to die."""
    try:
        return cluster.over()
    except OpsError:
        return False


def _wait(seconds: float, process: Process) -> None:
    """Wait for the process to end, at most this long."""
    ends = time.monotonic() + seconds
    while process.exit_code is None and time.monotonic() < ends:
        time.sleep(0.02)


def _death(point: str, write: Write, draw: Random) -> Fault:
    return Death(point, draw.randint(1, write.times))


def _lost_state(point: str, name: str, draw: Random) -> Fault:
    return LostState(draw.randrange(3), point, name)


def _half(draw: Random) -> tuple[int, ...]:
    return tuple(sorted(draw.sample(range(DAEMONS), DAEMONS // 2)))


def _moment(draw: Random) -> float:
    """A random time in seconds, up to about two rounds."""
    return round(draw.uniform(0.0, 0.8), 3)


DEATHS: dict[str, Callable[[Random], Fault]] = {
    f"death {point}": partial(_death, point, write) for point, write in points(*EVERY_ROUND, *AT_THE_END).items()
}
RARE_POINTS = points(*NEW_EPOCH)
WHEN_UNUSED = ("before spool's removal", "behind spool's removal")
PROCESSES: dict[str, Callable[[Random], Fault]] = {
    "kill coordinator": lambda draw: Kill(_moment(draw)),
    "kill coordinator twice": lambda draw: Kill(_moment(draw), round(draw.uniform(0.5, 3.0), 3)),
    "terminate coordinator": lambda draw: Terminate(_moment(draw)),
    "freeze coordinator": lambda draw: Freeze(_moment(draw), round(draw.uniform(1.0, 5.0), 3)),
    "freeze daemon": lambda draw: Freeze(_moment(draw), round(draw.uniform(1.0, 5.0), 3), draw.randrange(DAEMONS)),
    "kill daemon": lambda draw: KillDaemons(_moment(draw), (draw.randrange(DAEMONS),)),
    "kill half of the daemons": lambda draw: KillDaemons(_moment(draw), _half(draw)),
    "half of the daemons gone": lambda draw: KillDaemons(_moment(draw), _half(draw), at_once=False),
    "lost state": partial(_lost_state, "", "lost state"),
    **{
        name: partial(_lost_state, point, name)
        for name, point in ((f"lost state and death {point}", point) for point in RARE_POINTS)
    },
}
