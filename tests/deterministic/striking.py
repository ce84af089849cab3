"""The faults of a plan that strike at effects of processes, at calls and at uploads."""

from __future__ import annotations

from tests.deterministic.effects import Directive
from tests.deterministic.loop import Process, VirtualLoop
from tests.deterministic.network import Trouble
from tests.deterministic.plan import SERVER, Fault, Plan
from tests.deterministic.seen import Seen

_WINDOWS = {"full": "file", "away": "ledger", "store": "store"}
"""Faults that last, and the effects that they meet."""


class Faults:
    """Which of them has struck, and which are due."""

    def __init__(self, plan: Plan, loop: VirtualLoop, seen: Seen) -> None:
        self._plan, self._loop, self.seen = plan, loop, seen
        self.down_s: dict[str, float] = {}
        """How long a killed process stays down, by its name."""
        self._left = {id(fault): fault.number for fault in plan.faults}
        self._used: set[int] = set()
        self._ends: dict[int, float] = {}

    def watch(self, process: Process, name: str) -> Directive:
        """What happens to an effect."""
        now, who = self._loop.time(), process.name
        self.seen.effects[f"{'server' if who == SERVER else 'client'} {name}"] += 1
        for fault in self._plan.faults:
            if fault.who != who or now < fault.at or id(fault) in self._used:
                continue
            if fault.kind in _WINDOWS:
                if not name.startswith(_WINDOWS[fault.kind]):
                    continue
                ends = self._ends.get(id(fault))
                if ends is None:
                    if not self._due(fault):
                        continue
                    ends = self._ends[id(fault)] = now + fault.seconds
                    self.happened(fault)
                if now < ends:
                    return self._within(fault)
                self._used.add(id(fault))
            if fault.kind == "kill" and fault.name in ("", name) and self._due(fault):
                self._used.add(id(fault))
                self.happened(fault)
                self.down_s[who] = fault.seconds
                return fault.how  # type: ignore[return-value]
        return ""

    def _within(self, fault: Fault) -> Directive:
        """What happens to an effect in the time of a fault. A store that is too busy refuses every second request."""
        if fault.kind == "full":
            return "full"
        self._left[id(fault)] -= 1
        if fault.how == "busy" and self._left[id(fault)] % 2:
            return ""
        return "unknown" if fault.how == "unanswered" else "away"

    def _due(self, fault: Fault) -> bool:
        self._left[id(fault)] -= 1
        return self._left[id(fault)] < 0

    def happened(self, fault: Fault) -> None:
        """Count a fault."""
        self.seen.happened[fault.kind] += 1
        self.seen.note(self._loop.time(), f"fault {fault}")

    def trouble(self, client: str, method: str, number: int) -> Trouble | None:
        """What the network does to a call."""
        for fault in self._plan.faults:
            if fault.kind == "call" and (fault.who, fault.name, fault.number) == (client, method, number):
                self.happened(fault)
                match fault.how:
                    case "lost":
                        return Trouble(loses_request=True)
                    case "unanswered":
                        return Trouble(loses_answer=True)
                    case "repeated":
                        return Trouble(repeats_after_s=fault.seconds)
                    case "late":
                        return Trouble(late_s=fault.seconds)
                    case "cut":
                        return Trouble(cuts_after=1 + number % 3)
        return None

    def lie(self, client: str, number: int) -> str:
        """The kind of the lie of an upload; empty for an honest one."""
        for fault in self._plan.faults:
            if fault.kind == "lie" and (fault.who, fault.number) == (client, number):
                self.happened(fault)
                return fault.how
        return ""
