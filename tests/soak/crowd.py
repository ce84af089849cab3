"""Daemons that come and go: by SIGTERM, by SIGKILL, held up by SIGSTOP, back under an old name, or new."""

from __future__ import annotations

import signal
import subprocess
from collections import Counter
from random import Random

from tests.integration.harness import Coordinator, Daemon
from tests.integration.processes import Place
from tests.soak.plan import STEADY, TASK, Plan

_LEFT_WELL = (0, -signal.SIGTERM)
"""Exit codes after SIGTERM: the latter of one that had not yet come to listen to it."""
_HELD_UP_S = (1.0, 60.0)
"""How long a SIGSTOP lasts: from what nobody notices to longer than keepalive waits."""


class Crowd:
    """Everybody but the coordinator, by client id."""

    def __init__(self, place: Place, server: Coordinator, plan: Plan) -> None:
        self._place, self._server, self._plan = place, server, plan
        self._chance = Random(plan.seed)
        self._here: dict[str, Daemon] = {}
        self._held_up: dict[str, tuple[Daemon, float]] = {}
        self._leaving: dict[str, Daemon] = {}
        self._gone: dict[str, Daemon] = {}
        self._new = 0
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []

    def __len__(self) -> int:
        return len(self._here) + len(self._held_up)

    @property
    def gone(self) -> list[str]:
        """Ids of those that left."""
        return sorted(self._gone)

    def act(self, now: float) -> None:
        """Somebody comes or somebody goes."""
        self._look_after(now)
        others = sorted(self._here.keys() - {STEADY})
        full = len(self) >= self._plan.daemons
        few = len(self) < self._plan.daemons * 0.7
        if few or (not full and self._chance.random() < 0.5) or not others:
            if not full:
                self.join()
            return
        name = self._chance.choice(others)
        self._chance.choice((self._terminate, self._kill, self._hold_up))(name, now)

    def begin(self) -> Daemon:
        """The one that stays is here from now on."""
        return self._here[self.join(STEADY)]

    def join(self, name: str = "") -> str:
        """Somebody comes: of this name, back, or new; who it was."""
        if not name and self._gone and self._chance.random() < 0.6:
            name = self._chance.choice(sorted(self._gone))
        daemon = self._gone.pop(name, None)
        self.counts["came back" if daemon else "came new"] += 1
        daemon = daemon or self._daemon(name or f"edge-{self._new}")
        self._here[daemon.client_id] = daemon.start()
        return daemon.client_id

    def _daemon(self, name: str) -> Daemon:
        index = self._new % self._plan.daemons
        self._new += 1
        shard = {"partition": {"method": "iid", "clients": self._plan.daemons, "seed": 1}, "index": index}
        task = {"name": TASK, "options": {"pause_s": self._plan.pause_s, "kept": 2}}
        return Daemon(self._place, self._server, name, task=task, shard=shard)

    def _terminate(self, name: str, now: float = 0.0) -> None:
        self.counts["terminated"] += 1
        self._leaving[name] = self._here.pop(name)
        self._leaving[name].signal(signal.SIGTERM)

    def _kill(self, name: str, now: float) -> None:
        self.counts["killed"] += 1
        self._gone[name] = self._here.pop(name)
        self._gone[name].kill()

    def _hold_up(self, name: str, now: float) -> None:
        self.counts["held up"] += 1
        daemon = self._here.pop(name)
        daemon.signal(signal.SIGSTOP)
        self._held_up[name] = (daemon, now + self._chance.uniform(*_HELD_UP_S))

    def _look_after(self, now: float) -> None:
        """Wake who was held up long enough; see who has left."""
        for name in [name for name, (_, until) in self._held_up.items() if until <= now]:
            daemon, _ = self._held_up.pop(name)
            daemon.signal(signal.SIGCONT)
            self._here[name] = daemon
        for name in [name for name, daemon in self._leaving.items() if daemon.exit_code is not None]:
            self._gone[name] = self._leaving.pop(name)
            self._check_exit(name)
        for name in [name for name, daemon in self._here.items() if daemon.exit_code is not None]:
            self.faults.append(f"{name} ended by itself with {self._here[name].exit_code}")
            self._gone[name] = self._here.pop(name)

    def _check_exit(self, name: str) -> None:
        if (code := self._gone[name].exit_code) not in _LEFT_WELL:
            self.faults.append(f"{name} ended with {code} after SIGTERM")

    def send_home(self) -> None:
        """Everybody goes, and has gone when this returns."""
        self._look_after(float("inf"))
        for name in sorted(self._here):
            self._terminate(name)
        for daemon in self._leaving.values():
            self._see_off(daemon)
        self._look_after(0.0)

    def _see_off(self, daemon: Daemon) -> None:
        try:
            daemon.wait()
        except subprocess.TimeoutExpired:
            self.faults.append(f"{daemon.name} does not end after SIGTERM:\n{daemon.tail()}")
            daemon.kill()
