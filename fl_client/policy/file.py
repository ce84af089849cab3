"""The policy file of a running daemon, read again when it changes, and the gate that it closes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from zoneinfo import ZoneInfo

import structlog

from fl_client.errors import ConfigError
from fl_client.gates.conditions import WindowGate
from fl_client.gates.gate_set import GateReading
from fl_client.policy.config import NO_POLICY, HourRules, Policy, read_policy
from fl_client.settings.schedule import Schedule
from protos.fl.v1.coordinator_pb2 import UNAVAILABLE_REASON_OWNER

log = structlog.get_logger()

CHECK_S = 5.0
"""Seconds between two looks at the policy file, and between two writes of the day's counts."""

_Stamp = tuple[int, int, int] | None


@dataclass(frozen=True, slots=True)
class InForce:
    """The policy in force at one moment."""

    policy: Policy
    problem: str = ""
    """Why the file cannot be used now; empty if it can. `policy` is the last one that could."""
    version: int = 0
    """Increases with every change of `policy` or `problem`."""


class PolicyFile:
    """The policy in force. Any thread may read `now` and call `refresh`."""

    def __init__(self, path: Path | None, check_s: float = CHECK_S) -> None:
        """Read the file. Raises ConfigError.

        path: None for a device without a policy. check_s: seconds between two looks at the file.
        """
        self.path, self.check_s = path, check_s
        self._lock = threading.Lock()
        self._stamp = _stamp(path)
        self.now = InForce(NO_POLICY if path is None else read_policy(path))

    def refresh(self) -> bool:
        """Read the file again if it has changed; blocking. Returns whether policy or problem changed."""
        if self.path is None:
            return False
        with self._lock:
            stamp = _stamp(self.path)
            if stamp == self._stamp and stamp is not None:
                return False
            self._stamp = stamp
            try:
                return self._use(read_policy(self.path), "")
            except ConfigError as error:
                return self._use(self.now.policy, str(error))

    def _use(self, policy: Policy, problem: str) -> bool:
        if (policy, problem) == (self.now.policy, self.now.problem):
            return False
        self.now = InForce(policy, problem, self.now.version + 1)
        if problem:
            todo = "repair the file; this daemon takes no work until then, and needs no restart"
            log.error("policy_unusable", path=str(self.path), reason=problem, todo=todo)
        else:
            log.info("policy_changed", path=str(self.path), rules=sorted(policy.model_dump(exclude_defaults=True)))
        return True


def _stamp(path: Path | None) -> _Stamp:
    """What changes with the file. None where there is none."""
    try:
        stat = path.stat() if path is not None else None
    except OSError:
        return None
    return None if stat is None else (stat.st_mtime_ns, stat.st_size, stat.st_ino)


NAME = "policy"


class PolicyGate:
    """Reads the policy in force. Its closing ends a round in progress, unlike that of gates.windows."""

    name = NAME
    reason = UNAVAILABLE_REASON_OWNER
    debounced = False

    def __init__(self, file: PolicyFile, clock: Callable[[], float]) -> None:
        """clock: Unix seconds."""
        self._file, self._clock = file, clock
        self._hours: HourRules | None = None
        self._window: WindowGate | None = None

    def check(self) -> GateReading:
        """See Gate."""
        self._file.refresh()
        if self._file.now.problem:  # what is wrong with the file is the site's affair: the log has it
            return GateReading(open=False, detail="the site's policy file cannot be used")
        if (hours := self._file.now.policy.hours) != self._hours:
            self._hours, self._window = hours, self._window_of(hours)
        return GateReading(open=True) if self._window is None else self._window.check()

    def _window_of(self, hours: HourRules) -> WindowGate | None:
        if hours.windows is None:
            return None
        zone = ZoneInfo(hours.timezone) if hours.timezone else None
        return WindowGate(Schedule(hours.windows, zone), hours.timezone, self._clock)
