"""Depth 1: a life of the core with its driver's steps alone, among kills, clients and operators made by one seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, chain

from fl_server.rounds import events as ev
from fl_server.rounds.state import Phase, RoundState, UnexpectedEvent
from tests.deterministic.core_checks import check_deadline, check_end, check_restored, check_state
from tests.deterministic.core_driver import Driver
from tests.deterministic.core_ledger import Asked, Clock, Ledger, Place, Told
from tests.deterministic.core_policies import ROUNDS, policy_of
from tests.deterministic.core_stages import update_of

CLIENTS = tuple(f"c{number}" for number in range(8))
MOST_STEPS = 1500
"""Steps of a life with faults. Then they end."""
MOST_AFTER, MOST_AFTER_SECURE = 1500, 6000
"""Steps within which a run completes after the faults; the second with secure aggregation."""

SAVED_EVERY = 5
"""Steps between two writes of the time that an attempt has left."""
LONG_DOWN_S = 3600.0


@dataclass(frozen=True, slots=True)
class CoreFault:
    """What happens in one step of a life."""

    step: int
    what: str


class CoreLife:
    """The world of one life."""

    def __init__(self, seed: int, faults: tuple[int, ...] | None = None) -> None:
        """faults: the steps in which faults may happen; None: all."""
        self.draw = random.Random(f"core {seed}")
        self.policy = policy_of(seed, self.draw)
        self.new = RoundState(self.policy, ROUNDS)
        self.ledger, self.told, self.clock = Ledger(ROUNDS), Told(), Clock()
        self.faulty = self.draw.choice((0.0, 0.02, 0.05, 0.15))
        self.chance, self.kill_chance = sum(_FAULTS.values()) * self.faulty, 0.3 * self.faulty
        self.may = faults if faults is None else frozenset(faults)
        self.happened: list[CoreFault] = []
        self.step = 0
        self.healing = False
        self._attach(CLIENTS)
        self.made: dict[tuple[str, int, int, int, int], bytes] = {}
        """Updates that clients have computed, by (client, round, exchange, epoch, draw)."""
        self.old: list[tuple[str, Place, bytes, int, int]] = []
        """Uploads that may be repeated, late."""
        self.told_before: list[tuple[str, Asked]] = []
        """Answers to stages that may be repeated, late."""
        self.begin()

    def begin(self) -> None:
        """A process starts."""
        self.driver = self._process()
        # Sessions are gone, and what was under way with them.
        for under_way in (self.told.assigned, self.told.asked, self.told.masks):
            under_way.clear()
        self.running: Iterator[str] | None = self.driver.restore(frozenset(self.present))
        self.settled = False

    def _process(self) -> Driver:
        return Driver(self.new, self.ledger, self.told, self.clock)

    def _down_s(self) -> float:
        """Seconds until another process starts."""
        return LONG_DOWN_S if self.step % 2 else 1.0

    # Steps.

    def live(self) -> None:
        """Until the run is over. Raises AssertionError for what an invariant forbids."""
        try:
            while self.running is not None or not self._over():
                self._step()
                self.step += 1
                if self.step == MOST_STEPS:
                    self._heal()
                most = MOST_AFTER_SECURE if self.policy.secure else MOST_AFTER
                assert self.step < MOST_STEPS + most, f"every run ends: not {self._describe()}"
            check_end(self.driver, {fault.what for fault in self.happened})
        except UnexpectedEvent as error:
            raise AssertionError(f"every event has a rule: {error}") from error

    def _describe(self) -> str:
        state = self.driver.state
        return (
            f"{state.phase}, round {state.round}.{state.exchange} attempt {state.attempt}, drawn {sorted(state.drawn)},"
            f" out {sorted(state.out)}, admitted {list(state.arrivals.clients())}, work {list(self.driver.work)},"
            f" deadline {self.driver.deadline}, retries {self.driver.retries}, paused {state.paused}"
        )

    def _over(self) -> bool:
        return self.driver.state.phase is Phase.ENDED and not self.driver.work

    def _attach(self, clients: tuple[str, ...]) -> None:
        """Have a session with each of these clients, and with no other."""
        self.present, self.told.present = clients, frozenset(clients)

    def _heal(self) -> None:
        self.healing = True
        self._attach(CLIENTS)

    def _fault(self, what: str, chance: float) -> bool:
        """Whether a fault happens in this step. The same numbers are drawn whether it may or not."""
        return self.draw.random() < chance * self.faulty and self._happens(what)

    def _happens(self, what: str) -> bool:
        """Whether a fault that is drawn may happen in this step."""
        if self.healing or (self.may is not None and self.step not in self.may):
            return False
        self.happened.append(CoreFault(self.step, what))
        return True

    def _step(self) -> None:
        self.clock.go_on(1.0)
        if self.step % SAVED_EVERY == 0 and self.driver.deadline is not None:
            self.ledger.seconds_left = self.driver.deadline - self.clock.now
        if self.draw.random() < self.kill_chance and self._happens("kill"):
            self._kill()
        elif self.running is None:
            self._next()
        elif next(self.running, None) is None:
            self.running = None
            check_state(self.driver)

    def _kill(self) -> None:
        quiet = self.running is None
        before = self.driver.state
        self.clock.now += self._down_s()
        self.begin()
        if quiet and before.phase is not Phase.ENDED:
            assert self.running is not None
            restored = next(self.running)  # it has its state again, and did nothing yet
            check_restored(before, self.driver.state)
            self.running = chain((restored,), self.running)

    def _do(self, work: Iterator[str]) -> None:
        self.running = work

    def _next(self) -> None:
        """Something happens: one of what is possible, by the seed."""
        if self.driver.deadline is not None and self.driver.deadline <= self.clock.now:
            self._deadline()
        elif not self.settled or self.draw.random() < 0.03 or not (possible := self._possible()):
            self._roster()
        else:
            getattr(self, f"_{self.draw.choice(possible)}")()

    def _possible(self) -> list[str]:
        """What can happen now; the more often in the list, the more likely."""
        draw, driver, state, possible = self.draw, self.driver, self.driver.state, list[str]()
        if driver.work:
            possible += ["work"] * 3
        if self._ready():
            possible += ["deliver"] * 4
        if self.told.asked:
            possible += ["answer"] * 4
        if driver.retries:
            possible.append("retry")
        busy = self.told.asked if state.staged else self.told.assigned
        if state.policy.buffered and state.work and (not busy or draw.random() < 0.05):
            possible.append("deadline")
        if driver.deadline is not None and (not busy or draw.random() < 0.05):
            possible.append("deadline")
        if state.paused and (self.healing or draw.random() < 0.2):
            possible.append("resume")
        if state.phase is not Phase.ENDED and draw.random() < self.chance:
            possible += filter(self._happens, draw.choices(_NAMES, cum_weights=_WEIGHTS))
        return possible

    # What happens.

    def _roster(self) -> None:
        waited = self.settled or self.draw.random() < 0.5
        self.settled = self.settled or waited
        shut_out = len(CLIENTS) - len(self.present)
        self._do(self._rejoin(ev.RosterChanged(self.present, self.settled, shut_out)))

    def _rejoin(self, event: ev.RosterChanged) -> Iterator[str]:
        yield from self.driver.take(event)
        state = self.driver.state
        if not state.under_way:
            return
        for client in self.present:
            if state.may_return(client) and self.driver.state.may_return(client) and self.draw.random() < 0.5:
                yield from self.driver.take(ev.ClientReturned(client))
            if client not in self.told.assigned:
                self.driver.assign(client)

    def _work(self) -> None:
        place = self.draw.randrange(len(self.driver.work))
        work = self.driver.work[place]
        del self.driver.work[place]
        state = self.driver.state
        computing = work in ("reduce", "step")
        if self.policy.secure and work == "step" and self._fault("spoil", 3.0):
            self._do(self.driver.take(ev.RoundSpoiled("its norm is over the clip")))
        elif computing and state.accepted and not self.policy.secure and self._fault("culprits", 2.0):
            client = self.draw.choice(state.accepted)[0]
            self._do(self.driver.take(ev.CulpritsFound(((client, "it spoils the sum"),))))
        else:
            self._do(self.driver.finish(work))

    def _deliver(self) -> None:
        draw = self.draw
        client = draw.choice(self._ready())
        round_, exchange, epoch, model = self.told.assigned.pop(client)
        place, attempt = (round_, exchange), self.told.masks.pop(client, (0, 0))[1]
        if self._fault("refuse", 1.0):
            self._do(self.driver.refuse(client, place, draw.choice(("", "not_finite", "norm"))))
        elif self._fault("fail", 1.0):
            self._do(self.driver.fail(client, place, not_finite=draw.random() < 0.3))
        elif self._fault("restart", 0.5):
            self._do(self.driver.restart_client(client, place))
        elif self._fault("lose state", 0.7):
            self._do(self.driver.lose_state(client, place))
        else:
            made = update_of(self.driver.state, client, place, epoch, model, attempt)
            known = self.made.setdefault((client, round_, exchange, epoch, attempt), made)
            assert known == made, f"repeated work is the same: not that of {client} for {place}"
            self.old.append((client, place, made, epoch, attempt))
            self._do(self.driver.admit(client, place, made))

    def _ready(self) -> list[str]:
        """The clients that can deliver: with secure aggregation after the shares of the others."""
        assigned = self.told.assigned
        if self.policy.secure:
            return sorted(
                client for client, mask in self.told.masks.items() if assigned.get(client, ())[:1] == mask[:1]
            )
        return sorted(assigned)

    def _answer(self) -> None:
        """A client answers a stage, or its work fails beside it."""
        client = self.draw.choice(sorted(self.told.asked))
        asked = self.told.asked.pop(client)
        place = (asked.round, 0)
        if self._fault("fail", 0.5):
            self._do(self.driver.fail(client, place, not_finite=False))
        elif self._fault("restart", 0.5):
            self._do(self.driver.restart_client(client, place))
        else:
            self.told_before.append((client, asked))
            self._do(self.driver.answer(client, asked))

    def _retry(self) -> None:
        self.driver.retries = False
        self._do(self.driver.take(ev.RetryDue()))

    def _deadline(self) -> None:
        if self.policy.buffered:  # of the first draw that is under way
            first = min((work.version, work.attempt) for work in self.driver.state.work.values())
            self._do(self.driver.take(ev.DeadlinePassed(*first)))
            return
        assert self.driver.deadline is not None
        self.clock.go_on(max(0.0, self.driver.deadline - self.clock.now))
        self.driver.deadline = None
        check_deadline(self.driver)
        self._do(self.driver.take(ev.DeadlinePassed()))

    def _resume(self) -> None:
        self.ledger.paused = False
        self._do(self.driver.take(ev.ResumeRequested()))

    def _pause(self) -> None:
        self.ledger.paused = True
        self._do(self.driver.take(ev.PauseRequested()))

    def _leave(self) -> None:
        client = self.draw.choice(CLIENTS)
        self._attach(tuple(each for each in self.present if each != client))
        for under_way in (self.told.assigned, self.told.asked, self.told.masks):
            under_way.pop(client, None)
        if self.driver.state.works(client):
            self._do(self.driver.take(ev.ClientDroppedOut(client)))

    def _come(self) -> None:
        self._attach(tuple(sorted({*self.present, self.draw.choice(CLIENTS)})))
        self._roster()

    def _repeat(self) -> None:
        if self.old:
            client, place, made, epoch, attempt = self.draw.choice(self.old[-12:])
            state = self.driver.state
            late = (
                self.policy.secure and attempt < state.first_attempt
            )  # admission refuses these, and those of another epoch
            if self.told_before and self.draw.random() < 0.5:
                self._do(self.driver.answer(*self.draw.choice(self.told_before[-20:])))
            elif epoch == state.state_epoch and not late:
                self._do(self.driver.admit(client, place, made))

    def _extend(self) -> None:
        if self.ledger.rounds < ROUNDS + 2:
            self.ledger.rounds += 1
            self.ledger.judged_from = self.driver.state.round
            self._do(self.driver.take(ev.Extended(self.ledger.rounds)))

    def _states(self) -> None:
        if self.policy.population or self.policy.private:
            self._do(self.driver.take(ev.StatesLost("a client was forgotten", self.driver.state.state_epoch)))


_FAULTS = {"pause": 0.1, "leave": 0.5, "come": 1.0, "repeat": 1.0, "extend": 0.1, "states": 0.1}
"""Chance of each fault in a step, times the life's own."""
_NAMES, _WEIGHTS = tuple(_FAULTS), tuple(accumulate(_FAULTS.values()))


def live_core(seed: int, faults: tuple[int, ...] | None = None) -> tuple[str, list[CoreFault]]:
    """Live a life. Returns what was violated, empty if nothing, and the faults that happened."""
    life = CoreLife(seed, faults)
    try:
        life.live()
    except AssertionError as error:
        return str(error), life.happened
    return "", life.happened
