"""Lives of the core with leaders that were replaced and run on: stopped, or cut off, when another one took the lease.

A standby takes the lease when the rule of the product lets it, by the virtual clock of the database. The ledger counts
its openings, and each write of a driver checks that the last opening is its own. A former leader takes steps on as
before, from its own memory: it finishes work, gets updates from clients that are still attached to it, puts and removes
objects, and sends. A step that would change the ledger is refused and ends it. What it sends without a write stands: a
client that it acknowledges relies on that.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from fl_server.leadership import LOOK_EVERY_S
from fl_server.rounds import events as ev
from fl_server.rounds.state import Phase, UnexpectedEvent
from fl_server.store.database.lease import Leader, LeaseTerms, is_held
from fl_server.store.database.store import GONE_S
from fl_server.store.database.transactions import Home
from tests.deterministic.core_driver import Driver
from tests.deterministic.core_life import CoreFault, CoreLife
from tests.deterministic.core_objects import ObjectRules, Objects, StoredDriver, check_objects

KEPT = 0.6
"""Share of the ends of a leader that only replace it."""
FORMER = 0.5
"""Chance of a step of a former leader, beside each step of the leader."""
MOST = 3
"""Former leaders at a time."""


@dataclass
class Rules:
    """How writes are protected. Other values are planted faults."""

    checks: bool = True
    """Whether a write checks the opening."""
    counts: bool = True
    """Whether a takeover is a new opening."""
    in_transaction: bool = True
    """Whether the check is part of the write's transaction; else it is one step older."""
    waits: bool = True
    """Whether a standby waits for the lease. Nothing but its own time depends on that."""
    objects: ObjectRules = field(default_factory=ObjectRules)


@dataclass
class Former:
    """A leader that was replaced."""

    driver: Driver
    opening: int
    running: Iterator[str] | None
    passed: bool = True
    """Whether its last check, before this step, found its own opening."""


class ReplacedLife(CoreLife):
    """A life with former leaders."""

    def __init__(self, seed: int, rules: Rules) -> None:
        self.formers: list[Former] = []
        self.rules, self.openings, self.replaced = rules, 0, 0
        self.objects, self.until, self.killed = Objects(rules.objects), 0.0, False
        self.chances = random.Random(f"replaced {seed}")
        super().__init__(seed)

    def begin(self) -> None:
        """A process takes the lease."""
        self.openings += self.rules.counts
        super().begin()

    def _process(self) -> Driver:
        parts = self.new, self.ledger, self.told, self.clock
        return StoredDriver(*parts, objects=self.objects, opening=self.openings)

    def _down_s(self) -> float:
        """Until a standby may take the lease: when it is over, or the leader's connections are gone for long enough."""
        waited, two = 0.0, Home("two")
        while self.rules.waits:
            now = self.clock.now + waited
            gone = self.openings if self.killed and waited >= GONE_S else 0
            if not is_held(Leader(self.openings, "one", "one", 0.0, self.until - now), two.id, LeaseTerms(gone=gone)):
                break
            waited += LOOK_EVERY_S
        return waited

    def _step(self) -> None:
        self.until = self.clock.now + LeaseTerms().seconds  # the leader renews its lease each second
        super()._step()
        check_objects(self.ledger, self.objects)
        if self.formers and self.chances.random() < FORMER:
            former = self.chances.choice(self.formers)
            if not self._run_on(former):
                self.formers.remove(former)

    def _kill(self) -> None:
        if self.chances.random() < KEPT and len(self.formers) < MOST:
            # Steps of the life itself, which use its leader, end with the leader.
            frame = getattr(self.running, "gi_frame", None)
            own = frame is not None and frame.f_locals.get("self") is self.driver
            former = Former(self.driver, self.openings, self.running if own else None)
            # Its steps under way refer to the ledger, so that one becomes its copy.
            former.driver.told, self.ledger = copy.deepcopy((self.told, self.ledger))
            self.formers.append(former)
            self.replaced += 1
            self.killed = False
        else:
            self.killed = True
        super()._kill()

    def _run_on(self, former: Former) -> bool:
        """One step of a former leader. Returns False if that was its end."""
        # It works on a copy, of which a write that is not refused is put into the ledger.
        vars(former.driver.ledger).update(copy.deepcopy(vars(self.ledger)))
        known = set(former.driver.told.acknowledged)
        try:
            goes_on = self._advance(former)
        except (AssertionError, KeyError, IndexError, UnexpectedEvent) as error:
            if "objects are written once" in str(error):
                raise
            goes_on = False  # it met what another leader wrote
        if former.driver.ledger != self.ledger:
            if not self._may_write(former):
                check_objects(self.ledger, self.objects)
                return False
            vars(self.ledger).update(copy.deepcopy(vars(former.driver.ledger)))
        check_objects(self.ledger, self.objects)
        former.passed = former.opening == self.openings
        for key in set(former.driver.told.acknowledged) - known:
            self.told.acknowledged[key] = former.driver.told.acknowledged[key]
        return goes_on

    def _may_write(self, former: Former) -> bool:
        if not self.rules.checks:
            return True
        return former.opening == self.openings if self.rules.in_transaction else former.passed

    def _advance(self, former: Former) -> bool:
        if former.running is None:
            former.running = self._something(former.driver)
        if former.running is None:
            return False
        if next(former.running, None) is None:
            former.running = None
        return True

    def _something(self, driver: Driver) -> Iterator[str] | None:
        """What may happen at a former leader: work ends, a client delivers, the deadline passes."""
        draw, possible = self.chances, list[str]()
        if driver.work:
            possible.append("work")
        if self.old and driver.state.phase is Phase.COLLECTING:
            possible += ["deliver", "deadline"]
        if not possible:
            return None
        kind = draw.choice(possible)
        if kind == "work":
            return driver.finish(driver.work.popleft())
        if kind == "deadline":
            return driver.take(ev.DeadlinePassed())
        client, place, made, _, _ = draw.choice(self.old[-6:])
        return driver.admit(client, place, made)


def live_replaced(seed: int, rules: Rules | None = None) -> tuple[str, int, list[CoreFault]]:
    """Live a life. Returns what was violated, how often a leader was replaced, and the faults that happened.

    At the end of a life nothing is left of what was to be removed.
    """
    life = ReplacedLife(seed, rules or Rules())
    try:
        life.live()
        left = life.ledger.removals
        assert not left or life.driver.work, f"objects that count no more are removed: not {left[:3]}"
    except (AssertionError, KeyError) as error:
        return str(error), life.replaced, life.happened
    return "", life.replaced, life.happened
