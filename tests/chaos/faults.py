"""What happens to processes: death at a point or at any moment, standstill, and half of the daemons gone."""

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
from tests.chaos.arena import DAEMONS, Arena
from tests.chaos.checks import ledger_of
from tests.chaos.fault import DidNotHappen, Fault
from tests.chaos.points import AT_THE_END, EVERY_ROUND, NEW_EPOCH, Write, points
from tests.integration.harness import Daemon
from tests.integration.processes import Process, eventually

AFTERLIFE_S = 1.0
"""What a coordinator still writes of a run that has ended takes less."""


@dataclass(frozen=True)
class Death:
    """The coordinator dies at the nth pass of a point, and is started again."""

    point: str
    nth: int = 1
    takes_away = False

    @property
    def name(self) -> str:
        return f"death {self.point}"

    def inject(self, arena: Arena, run_id: str) -> None:
        run, server = arena.server.run(run_id), arena.server
        server.orders.die(self.point, self.nth)
        must_come = not run.HasField("ended") and run.rounds_done + 1 < run.spec.stop.rounds
        try:
            eventually(lambda: server.exit_code is not None or _is_over(arena), f"the coordinator dies {self.point}")
            _wait(AFTERLIFE_S, server)
        finally:
            server.orders.withdraw()
        if server.exit_code is None:
            assert not must_come or self.point in NOT_ALWAYS, f"the run has ended and never came by: {self.point}"
            raise DidNotHappen(f"the run was over before it came by: {self.point}")
        obeyed = server.orders.obeyed
        assert server.exit_code == -signal.SIGKILL, f"expected death by SIGKILL, got exit code {server.exit_code}"
        assert obeyed, f"the coordinator died, and not {self.point}"
        server.serve()


@dataclass(frozen=True)
class LostState:
    """A daemon loses a client state that counts, and the coordinator may die when it writes that all begin anew."""

    which: int
    """Of the clients that counted in the first round."""
    point: str
    name: str
    takes_away = True
    waits = True
    jobs = ("scaffold",)

    def inject(self, arena: Arena, run_id: str) -> None:
        arena.until_round(1)
        with ledger_of(arena) as ledger:
            counted = ledger.accepted(run_id, 0, 0) or []
        daemon = arena.daemons[counted[self.which][0]]
        daemon.kill()
        for folder in ("states", "pending"):
            shutil.rmtree(Path(daemon.settings["state_dir"]) / folder, ignore_errors=True)
        daemon.start()
        if self.point:
            Death(self.point).inject(arena, run_id)


@dataclass(frozen=True)
class Kill:
    """SIGKILL of the coordinator at any moment; while it starts once more, too, if `again_s` is not None."""

    after_s: float
    again_s: float | None = None
    takes_away = False

    @property
    def name(self) -> str:
        return "kill coordinator" if self.again_s is None else "kill coordinator twice"

    def inject(self, arena: Arena, run_id: str) -> None:
        time.sleep(self.after_s)
        arena.server.kill()
        if self.again_s is not None:
            arena.server.start()
            time.sleep(self.again_s)
            arena.server.kill()
        arena.server.serve()


@dataclass(frozen=True)
class Terminate:
    """SIGTERM of the coordinator in mid-round: it drains, ends with 0, and is started again."""

    after_s: float
    takes_away = False
    name = "terminate coordinator"

    def inject(self, arena: Arena, run_id: str) -> None:
        time.sleep(self.after_s)
        code = arena.server.terminate()
        assert code == 0, f"told to stop, the coordinator ended with {code}"
        arena.server.serve()


@dataclass(frozen=True)
class Freeze:
    """SIGSTOP of the coordinator (daemon None) or of a daemon, and SIGCONT after a while."""

    after_s: float
    for_s: float
    daemon: int | None = None
    takes_away = False

    @property
    def name(self) -> str:
        return "freeze coordinator" if self.daemon is None else "freeze daemon"

    def inject(self, arena: Arena, run_id: str) -> None:
        process: Process = arena.server if self.daemon is None else _daemon(arena, self.daemon)
        time.sleep(self.after_s)
        process.signal(signal.SIGSTOP)
        try:
            time.sleep(self.for_s)
        finally:
            process.signal(signal.SIGCONT)


@dataclass(frozen=True)
class KillDaemons:
    """SIGKILL of daemons at any moment; they are started again at once, or when the round went on without them."""

    after_s: float
    daemons: tuple[int, ...]
    at_once: bool = True

    @property
    def takes_away(self) -> bool:
        return not self.at_once

    @property
    def name(self) -> str:
        if not self.at_once:
            return "half of the daemons gone"
        return "kill daemon" if len(self.daemons) == 1 else "kill half of the daemons"

    def inject(self, arena: Arena, run_id: str) -> None:
        if not self.at_once:
            arena.attend()  # a coordinator that has just been started would wait for them, by its reattach_grace_s
        time.sleep(self.after_s)
        daemons = [_daemon(arena, index) for index in self.daemons]
        for daemon in daemons:
            daemon.kill()
        before = arena.server.run(run_id)
        if not self.at_once and not before.HasField("ended"):
            still = _moved(before)
            eventually(lambda: _moved(arena.server.run(run_id)) != still, "the run goes on without them")
        for daemon in daemons:
            daemon.start()
        if not self.at_once and before.HasField("ended"):
            raise DidNotHappen("the run was over before they were gone")


def _moved(run: admin_pb2.RunStatus) -> tuple[object, ...]:
    """What changes when a round is closed, or tried again."""
    return run.rounds_done, run.attempt, run.phase == "selecting"


def _daemon(arena: Arena, index: int) -> Daemon:
    return list(arena.daemons.values())[index]


def _is_over(arena: Arena) -> bool:
    """Whether the run is; a coordinator that cannot be asked is about to be found dead."""
    try:
        return arena.over()
    except OpsError:
        return False


def _wait(seconds: float, process: Process) -> None:
    """For the process's end, so long at most."""
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
    """Seconds, up to about two rounds."""
    return round(draw.uniform(0.0, 0.8), 3)


DEATHS: dict[str, Callable[[Random], Fault]] = {
    f"death {point}": partial(_death, point, write) for point, write in points(*EVERY_ROUND, *AT_THE_END).items()
}
NOT_ALWAYS = points(*NEW_EPOCH)
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
        for name, point in ((f"lost state and death {point}", point) for point in NOT_ALWAYS)
    },
}
