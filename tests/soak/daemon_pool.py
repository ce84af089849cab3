"""The daemons of a soak: new or returning ones, ended by SIGTERM or SIGKILL, suspended by SIGSTOP."""

from __future__ import annotations

import signal
import subprocess
from collections import Counter
from random import Random

from tests.processes.federation import Coordinator, Daemon
from tests.processes.process import Workspace
from tests.soak.plan import STEADY, TASK, Plan

_EXIT_CODES = (0, -signal.SIGTERM)
"""Exit codes after SIGTERM; the second one is of a daemon that had not installed its handler yet."""
_SUSPENDED_S = (1.0, 60.0)
"""Range of a SIGSTOP's duration: from unnoticed to longer than the keepalive timeout."""


class DaemonPool:
    """All daemons, by client id."""

    def __init__(self, workspace: Workspace, server: Coordinator, plan: Plan) -> None:
        self._workspace, self._server, self._plan = workspace, server, plan
        self._random = Random(plan.seed)
        self._running: dict[str, Daemon] = {}
        self._suspended: dict[str, tuple[Daemon, float]] = {}
        self._terminating: dict[str, Daemon] = {}
        self._stopped: dict[str, Daemon] = {}
        self._new = 0
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []

    def __len__(self) -> int:
        return len(self._running) + len(self._suspended)

    @property
    def stopped(self) -> list[str]:
        """Ids of the stopped daemons."""
        return sorted(self._stopped)

    def act(self, now: float) -> None:
        """Start or end one daemon."""
        self._resume_and_collect(now)
        others = sorted(self._running.keys() - {STEADY})
        full = len(self) >= self._plan.daemons
        few = len(self) < self._plan.daemons * 0.7
        if few or (not full and self._random.random() < 0.5) or not others:
            if not full:
                self.start_one()
            return
        name = self._random.choice(others)
        self._random.choice((self._terminate, self._kill, self._suspend))(name, now)

    def start_steady(self) -> Daemon:
        """Start the daemon that runs through the whole soak."""
        return self._running[self.start_one(STEADY)]

    def start_one(self, name: str = "") -> str:
        """Start the daemon of this name, a returning or a new one; returns its id."""
        if not name and self._stopped and self._random.random() < 0.6:
            name = self._random.choice(sorted(self._stopped))
        daemon = self._stopped.pop(name, None)
        self.counts["returned" if daemon else "new"] += 1
        daemon = daemon or self._daemon(name or f"edge-{self._new}")
        self._running[daemon.client_id] = daemon.start()
        return daemon.client_id

    def _daemon(self, name: str) -> Daemon:
        index = self._new % self._plan.daemons
        self._new += 1
        shard = {"partition": {"method": "iid", "clients": self._plan.daemons, "seed": 1}, "index": index}
        task = {"name": TASK, "options": {"pause_s": self._plan.pause_s, "kept": 2}}
        return Daemon(self._workspace, self._server, name, task=task, shard=shard)

    def _terminate(self, name: str, now: float = 0.0) -> None:
        self.counts["terminated"] += 1
        self._terminating[name] = self._running.pop(name)
        self._terminating[name].signal(signal.SIGTERM)

    def _kill(self, name: str, now: float) -> None:
        self.counts["killed"] += 1
        self._stopped[name] = self._running.pop(name)
        self._stopped[name].kill()

    def _suspend(self, name: str, now: float) -> None:
        self.counts["suspended"] += 1
        daemon = self._running.pop(name)
        daemon.signal(signal.SIGSTOP)
        self._suspended[name] = (daemon, now + self._random.uniform(*_SUSPENDED_S))

    def _resume_and_collect(self, now: float) -> None:
        """Resume daemons after their suspension and collect those that ended."""
        for name in [name for name, (_, until) in self._suspended.items() if until <= now]:
            daemon, _ = self._suspended.pop(name)
            daemon.signal(signal.SIGCONT)
            self._running[name] = daemon
        for name in [name for name, daemon in self._terminating.items() if daemon.exit_code is not None]:
            self._stopped[name] = self._terminating.pop(name)
            self._check_exit(name)
        for name in [name for name, daemon in self._running.items() if daemon.exit_code is not None]:
            self.faults.append(f"{name} ended by itself with {self._running[name].exit_code}")
            self._stopped[name] = self._running.pop(name)

    def _check_exit(self, name: str) -> None:
        if (code := self._stopped[name].exit_code) not in _EXIT_CODES:
            self.faults.append(f"{name} ended with {code} after SIGTERM")

    def stop_all(self) -> None:
        """Terminate all daemons and wait until they have ended."""
        self._resume_and_collect(float("inf"))
        for name in sorted(self._running):
            self._terminate(name)
        for daemon in self._terminating.values():
            self._wait_for_exit(daemon)
        self._resume_and_collect(0.0)

    def _wait_for_exit(self, daemon: Daemon) -> None:
        try:
            daemon.wait()
        except subprocess.TimeoutExpired:
            self.faults.append(f"{daemon.name} does not end after SIGTERM:\n{daemon.tail()}")
            daemon.kill()
