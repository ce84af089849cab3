"""Depth 1: a life of the core with its driver's steps alone, among kills, clients and operators made by one seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fl_server.rounds import events as ev
from fl_server.rounds.directions import BY_LOSS
from fl_server.rounds.state import Phase, RoundPolicy, RoundState, UnexpectedEvent
from fl_server.rounds.stop_rules import StopPolicy
from tests.deterministic.core_driver import Broken, Driver, Ledger, Place, Told, digest, require

CLIENTS = tuple(f"c{number}" for number in range(8))
ROUNDS = 10
MOST_STEPS = 1500
"""Steps of a life with faults. Then they end."""
MOST_AFTER = 1500
"""Steps within which a run completes after the faults."""


@dataclass(frozen=True, slots=True)
class CoreFault:
    """What happens in one step of a life."""

    step: int
    what: str


def policy_of(draw: random.Random) -> RoundPolicy:
    """A run's policy."""
    clients = draw.choice((1, 2, 3, 3, 4))
    uses_metric = draw.random() < 0.3
    return RoundPolicy(
        seed=draw.randrange(1000),
        sampling=draw.choice(("fixed", "fixed", "fixed", "bernoulli")),
        clients_per_round=clients,
        rate=0.4,
        min_clients=draw.randint(clients, 5),
        close=draw.choice(("cohort", "cohort", "goal")),
        quorum=draw.randint(0, clients),
        min_accepted=min(clients, draw.choice((1, 1, 2))),
        over_selection=1.5,
        exchanges=draw.choice((1, 1, 2)),
        population=draw.choice((0, 0, 6)),
        evaluate_every=draw.choice((0, 1, 1, 3)) if not uses_metric else 1,
        await_evaluation=uses_metric,
        ask_clients_every=draw.choice((0, 0, 2)),
        stop=StopPolicy(BY_LOSS, 0.02 if uses_metric else None, draw.choice((0, 6)) if uses_metric else 0),
        rounds_between_restarts=draw.choice((0, 2)),
    )


class CoreLife:
    """The world of one life."""

    def __init__(self, seed: int, faults: tuple[int, ...] | None = None) -> None:
        """faults: the steps in which faults may happen; None: all."""
        self.draw = random.Random(f"core {seed}")
        self.policy = policy_of(self.draw)
        self.ledger, self.told = Ledger(ROUNDS), Told()
        self.faulty = self.draw.choice((0.0, 0.02, 0.05, 0.15))
        self.may = faults if faults is None else frozenset(faults)
        self.happened: list[CoreFault] = []
        self.step = 0
        self.healing = False
        self.present = set(CLIENTS)
        self.made: dict[tuple[str, int, int, int], bytes] = {}
        """Updates that clients have computed, by (client, round, exchange, epoch)."""
        self.old: list[tuple[str, Place, bytes, int]] = []
        """Uploads that may be repeated, late."""
        self.begin()

    def begin(self) -> None:
        """A process starts."""
        self.driver = Driver(self.policy, self.ledger, self.told)
        self.told.assigned.clear()  # sessions are gone, and what was under way with them
        self.running: Iterator[str] | None = self.driver.restore(frozenset(self.present))
        self.settled = False

    # Steps.

    def live(self) -> None:
        """Until the run is over. Raises Broken."""
        try:
            while not self._over():
                self._step()
                self.step += 1
                if self.step == MOST_STEPS:
                    self._heal()
                require(self.step < MOST_STEPS + MOST_AFTER, f"the run does not end: {self._describe()}")
            self._check_end()
        except UnexpectedEvent as error:
            raise Broken(f"unexpected: {error}") from error

    def _describe(self) -> str:
        state = self.driver.state
        return (
            f"{state.phase}, round {state.round}.{state.exchange} attempt {state.attempt}, drawn {sorted(state.drawn)},"
            f" out {sorted(state.out)}, admitted {list(state.arrivals.clients())}, work {list(self.driver.work)},"
            f" deadline {self.driver.deadline}, retries {self.driver.retries}, paused {state.paused}"
        )

    def _over(self) -> bool:
        return self.running is None and self.driver.state.phase is Phase.ENDED and not self.driver.work

    def _heal(self) -> None:
        self.healing = True
        self.present = set(CLIENTS)

    def _fault(self, what: str, chance: float) -> bool:
        """Whether a fault happens in this step. The same numbers are drawn whether it may or not."""
        wanted = self.draw.random() < chance * self.faulty
        if not wanted or self.healing or (self.may is not None and self.step not in self.may):
            return False
        self.happened.append(CoreFault(self.step, what))
        return True

    def _step(self) -> None:
        if self._fault("kill", 0.3):
            self._kill()
        elif self.running is not None:
            try:
                next(self.running)
            except StopIteration:
                self.running = None
                self._check_state()
        else:
            self._next()

    def _kill(self) -> None:
        quiet = self.running is None
        before = self.driver.state
        self.begin()
        if quiet and before.phase is not Phase.ENDED:
            self._check_restored(before)

    def _do(self, work: Iterator[str]) -> None:
        self.running = work

    def _next(self) -> None:
        """Something happens: one of what is possible, by the seed."""
        draw, driver, state = self.draw, self.driver, self.driver.state
        if not self.settled or draw.random() < 0.03:
            self._roster()
            return
        possible: list[str] = []
        if driver.work:
            possible += ["work"] * 3
        if self.told.assigned:
            possible += ["deliver"] * 4
        if driver.retries:
            possible.append("retry")
        if driver.deadline and (not self.told.assigned or draw.random() < 0.05):
            possible.append("deadline")
        if state.paused and (self.healing or draw.random() < 0.2):
            possible.append("resume")
        if state.phase is not Phase.ENDED:
            possible += [what for what, chance in _FAULTS.items() if self._fault(what, chance)]
        if not possible:
            self._roster()
            return
        getattr(self, f"_{draw.choice(possible)}")()

    # What happens.

    def _roster(self) -> None:
        waited = self.settled or self.draw.random() < 0.5
        self.settled = self.settled or waited
        shut_out = len(CLIENTS) - len(self.present)
        self._do(self._rejoin(ev.RosterChanged(tuple(sorted(self.present)), self.settled, shut_out)))

    def _rejoin(self, event: ev.RosterChanged) -> Iterator[str]:
        yield from self.driver.take(event)
        state = self.driver.state
        for client in sorted(self.present):
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
        if computing and state.accepted and self._fault("culprits", 2.0):
            client = self.draw.choice(state.accepted)[0]
            self._do(self.driver.take(ev.CulpritsFound(((client, "it spoils the sum"),))))
        else:
            self._do(self.driver.finish(work))

    def _deliver(self) -> None:
        draw = self.draw
        client = draw.choice(sorted(self.told.assigned))
        round_, exchange, epoch, model = self.told.assigned.pop(client)
        place = (round_, exchange)
        if self._fault("refuse", 1.0):
            self._do(self.driver.refuse(client, place, draw.choice(("", "not_finite", "norm"))))
        elif self._fault("fail", 1.0):
            self._do(self.driver.fail(client, place, not_finite=draw.random() < 0.3))
        elif self._fault("lose state", 0.7):
            self._do(self.driver.lose_state(client, place))
        else:
            made = digest(client, round_, exchange, epoch, model)
            known = self.made.setdefault((client, round_, exchange, epoch), made)
            require(known == made, f"{client} made two updates for {place}")
            self.old.append((client, place, made, epoch))
            self._do(self.driver.admit(client, place, made))

    def _retry(self) -> None:
        self.driver.retries = False
        self._do(self.driver.take(ev.RetryDue()))

    def _deadline(self) -> None:
        self.driver.deadline = False
        self._do(self.driver.take(ev.DeadlinePassed()))

    def _resume(self) -> None:
        self.ledger.paused = False
        self._do(self.driver.take(ev.ResumeRequested()))

    def _pause(self) -> None:
        self.ledger.paused = True
        self._do(self.driver.take(ev.PauseRequested()))

    def _leave(self) -> None:
        client = self.draw.choice(CLIENTS)
        self.present.discard(client)
        self.told.assigned.pop(client, None)
        if self.driver.state.works(client):
            self._do(self.driver.take(ev.ClientDroppedOut(client)))

    def _come(self) -> None:
        self.present.add(self.draw.choice(CLIENTS))
        self._roster()

    def _repeat(self) -> None:
        if self.old:
            client, place, made, epoch = self.draw.choice(self.old[-12:])
            if epoch == self.driver.state.state_epoch:  # admission refuses an update of another epoch
                self._do(self.driver.admit(client, place, made))

    def _extend(self) -> None:
        if self.ledger.rounds < ROUNDS + 2:
            self.ledger.rounds += 1
            self.ledger.judged_from = self.driver.state.round
            self._do(self.driver.take(ev.Extended(self.ledger.rounds)))

    def _states(self) -> None:
        if self.policy.population:
            self._do(self.driver.take(ev.StatesLost("a client was forgotten", self.driver.state.state_epoch)))

    # Invariants.

    def _check_state(self) -> None:
        """After the effects of an event."""
        state, ledger = self.driver.state, self.ledger
        require(state.round == len(ledger.commits) or state.phase is Phase.COMMITTING, f"the state is in {state.round}")
        require(state.out <= state.drawn, f"out {state.out} of {state.drawn}")
        require(not state.refused.keys() & set(state.arrivals.clients()), "a refused update counts")
        if self.policy.population:
            may_count = state.members | (state.drawn - state.out)
            require(len(may_count) <= self.policy.population, "more clients than the population")
        if state.phase is Phase.COLLECTING:
            require(state.working or state.fixed, "a round collects, and no client works")
            require(self.driver.deadline, "a round collects without a deadline")
        if state.phase is Phase.SELECTING and state.goal and state.settled:
            require(self.driver.retries, "a round waits for clients, and will not be tried again")
        place = (state.round, state.exchange)
        if state.collects:
            rows = ledger.updates.get(place, {})
            require(rows == dict(state.admitted), "the admitted updates are not those of the ledger")
            require(rows.keys() <= state.drawn, "an update of a client counts that was not drawn")

    def _check_restored(self, before: RoundState) -> None:
        """After a restart at rest all that decides is as it was."""
        for _ in self.driver.restore(frozenset(self.present)):
            break
        after = self.driver.state
        self.driver = Driver(self.policy, self.ledger, self.told)
        self.running = self.driver.restore(frozenset(self.present))
        same = ["round", "exchange", "state_epoch", "rounds", "paused", "epoch_rounds", "members", "lost"]
        if before.phase is Phase.COLLECTING and not before.fixed:
            same += ["phase", "goal", "refused", "failed", "attempt"]
            same += [] if before.repeated else ["admitted", "drawn"]
        if self.policy.stop.uses_metrics:
            same += ["judged", "judged_from"]
        if before.phase in (Phase.REDUCING, Phase.STEPPING, Phase.COMMITTING):
            same = [name for name in same if name not in ("members", "lost", "epoch_rounds")]
            require(after.fixed == before.accepted, f"the fixed list {after.fixed} is not {before.accepted}")
        for name in same:
            was, now = _plain(getattr(before, name)), _plain(getattr(after, name))
            require(was == now, f"{name} was {was} before a restart in {before.phase.value}, and is {now} after it")

    def _check_end(self) -> None:
        """At the end of the run."""
        ledger, state, policy = self.ledger, self.driver.state, self.policy
        if state.phase is not Phase.ENDED:
            return
        require(state.ending is not None, "the run has ended without a reason")
        faults = {fault.what for fault in self.happened} & {"refuse", "fail", "culprits"}
        require(ledger.status == "completed" or faults, f"the run has {ledger.status}: {ledger.reason}")
        model = b"first"
        for round_, (committed, accepted, epoch, _) in enumerate(ledger.commits):
            last = policy.exchanges - 1
            clients = [client for client, _ in accepted]
            where = f"round {round_}"
            require(clients == sorted(set(clients)), f"{where} counts {clients}")
            require(len(clients) >= policy.min_accepted, f"{where} has {len(clients)} updates")
            cohorts = {
                client for exchange, _, cohort in ledger.attempts[round_] if exchange == last for client in cohort
            }
            require(set(clients) <= cohorts, f"{where} counts {clients} and asked {cohorts}")
            if policy.sampling == "fixed" and not last:
                least = min(policy.quorum or (policy.clients_per_round + 1) // 2, policy.clients_per_round)
                require(len(clients) >= min(least, len(cohorts)), f"{where} closed with {len(clients)} of {least}")
                require(len(clients) <= policy.clients_per_round, f"{where} counts {len(clients)} updates")
            for client, made in accepted:
                require(made == digest(client, round_, last, epoch, model), f"{where}: {client} trained from another")
                require(ledger.updates[round_, last].get(client) == made, f"{where}: {client} was not admitted")
            require(committed == digest(model, accepted), f"{where}: another model was committed")
            model = committed
        for (round_, exchange, client), made in self.told.acknowledged.items():
            if round_ < len(ledger.commits):
                rows = ledger.updates.get((round_, exchange), {})
                require(rows.get(client) == made, f"the update of {client} in round {round_} was acknowledged and lost")
        require(self.told.announced <= len(ledger.commits), "a round was announced that is not committed")
        self._check_reason()

    def _check_reason(self) -> None:
        """The run ended for the first reason there was."""
        ledger, policy = self.ledger, self.policy
        done = len(ledger.commits)
        if ledger.status != "completed":
            return
        target = policy.stop.target
        if ledger.reason.endswith("rounds are done"):
            require(done == ledger.rounds, f"{done} of {ledger.rounds} rounds, and {ledger.reason}")
        if target is not None:
            reached = [round_ for round_, found in ledger.metrics.items() if found["loss"] <= target]
            judged = [round_ for round_ in reached if round_ >= ledger.judged_from]
            require(
                not judged or judged[0] >= done - 1, f"the target was reached in {judged}, and {done} rounds follow"
            )
        if policy.evaluate_every == 1:
            require(len(ledger.metrics) == done, f"{len(ledger.metrics)} of {done} rounds were evaluated")


_FAULTS = {"pause": 0.1, "leave": 0.5, "come": 1.0, "repeat": 1.0, "extend": 0.1, "states": 0.1}
"""Chance of each fault in a step, times the life's own."""


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else tuple(value) if isinstance(value, list) else value


def live_core(seed: int, faults: tuple[int, ...] | None = None) -> tuple[str, list[CoreFault]]:
    """Live a life. Returns what was violated, empty if nothing, and the faults that happened."""
    life = CoreLife(seed, faults)
    try:
        life.live()
    except Broken as error:
        return f"step {life.step}: {error}", life.happened
    return "", life.happened
