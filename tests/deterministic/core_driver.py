"""A driver of the core without tensors, files and sessions. It keeps the contract of order: write, act, send.

Its ledger is a few dictionaries, and its steps are a generator: a kill between any two of them drops the generator and
all that is in memory. A model is the digest of the model before it and of its accepted list.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from fl_server.rounds import effects as fx
from fl_server.rounds import events as ev
from fl_server.rounds import machine, restoring
from fl_server.rounds.by_client import ByClient, Failed, Lost, Refused
from fl_server.rounds.committing import clients_due, evaluation_due
from fl_server.rounds.restoring import SavedRound
from fl_server.rounds.state import Phase, RoundState, replace
from fl_server.rounds.stop_rules import Judged
from tests.deterministic import core_buffer, core_stages
from tests.deterministic.core_ledger import Asked, Clock, Ledger, Place, Told, digest

DEADLINE_S = 500.0
"""Time of an attempt."""


class Driver:
    """One process of the coordinator."""

    def __init__(self, new: RoundState, ledger: Ledger, told: Told, clock: Clock) -> None:
        """new: the state of a run that was created and not begun."""
        self.ledger, self.told, self.clock = ledger, told, clock
        self.state = new
        self.work: deque[str] = deque()
        """Long work under way: "reduce", "step", "commit", "evaluate 3", "ask 3"."""
        self.deadline: float | None = None
        """When the attempt under way is over, by the clock."""
        self.retries = False
        self.counted: dict[int, Any] = {}

    # The start.

    def restore(self, present: frozenset[str]) -> Iterator[str]:
        """Restore the state, and continue."""
        ledger, policy = self.ledger, self.state.policy
        done = len(ledger.commits)
        epochs = [commit[2] for commit in ledger.commits]
        of_epoch = [number for number, epoch in enumerate(epochs) if epoch == ledger.epoch]
        counted = of_epoch if policy.population else ()
        state = replace(
            self.state, rounds=ledger.rounds, round=done, paused=ledger.paused, state_epoch=ledger.epoch,
            epoch_rounds=len(of_epoch), over_selection=ledger.commits[-1][3] if done else 0.0,
            members=frozenset(client for number in counted for client, _ in ledger.commits[number][1]),
            judged_from=ledger.judged_from, draws=self.draws(),
            lost=ByClient(ledger.lost) if policy.population else ByClient(),
        )  # fmt: skip
        if ledger.status != "running":
            attempts = ledger.attempts.get(done, [])
            self.state = replace(
                state, phase=Phase.ENDED, ending=(ledger.status, ledger.reason), goal=1 if attempts else 0,
                attempt=max((attempt for _, attempt, _ in attempts), default=0),
            )  # fmt: skip
            running = replace(state, ending=None)
            for round_ in range(done):
                if round_ not in ledger.metrics and evaluation_due(running, round_):
                    self.work.append(f"evaluate {round_}")
            return
        state = restoring.restored_round(state, self.saved(done))
        state = restoring.without_absent(state, present)
        evaluations = [(round_, found) for round_, found in ledger.metrics.items() if round_ >= ledger.judged_from]
        missing: set[ev.Source] = set()
        for round_ in range(done):
            if round_ not in ledger.metrics and evaluation_due(state, round_):
                self.work.append(f"evaluate {round_}")
                missing |= {"server"} if round_ == done - 1 else set()
        if done and clients_due(state, done - 1) and done - 1 not in ledger.by_clients:
            missing.add("clients")
            self.work.append(f"ask {done - 1}")
        self.state = restoring.with_evaluations(state, evaluations, Judged(), missing)
        if (self.state.phase is Phase.COLLECTING or self.state.staged) and not policy.buffered:
            self.deadline = self.clock.now + self.time_left()
        yield "restored"
        yield from self.take(ev.RoundRestored())

    def draws(self) -> int:
        """How often a private run has drawn a cohort."""
        return len(self.ledger.charged)

    def time_left(self) -> float:
        """Seconds of the attempt under way that are left after a restart."""
        return self.ledger.seconds_left

    def saved(self, round_: int) -> SavedRound:
        """What the ledger has of a round."""
        if self.state.policy.buffered:
            return core_buffer.saved(self.ledger, self.state)
        attempts = self.ledger.attempts.get(round_, [])
        place = (round_, max((exchange for exchange, _, _ in attempts), default=0))
        admitted = tuple(self.ledger.updates.get(place, {}).items())
        refused, failed = self.ledger.refused.get(place, {}), self.ledger.failed.get(place, {})
        processes = dict(self.ledger.processes.get(place, {}))
        stages: Any = core_stages.saved_stages(self.ledger, self.state, round_)
        return SavedRound(
            list(attempts), admitted, self.ledger.fixed.get(place), dict(refused), dict(failed), processes, **stages
        )

    # Events.

    def take(self, event: ev.Event) -> Iterator[str]:
        """Process an event, if it still means something, and carry out its effects."""
        if not isinstance(event, ev.RoundRestored) and not machine.applies(event, self.state):
            return
        before = self.state
        self.state, effects = machine.advance(self.state, event)
        if before.phase is not self.state.phase and not (self.state.phase is Phase.COLLECTING or self.state.staged):
            self.deadline = None
        if before.phase is Phase.SELECTING and self.state.phase is not Phase.SELECTING:
            self.retries = False
        for effect in effects:
            yield from self.carry_out(effect)

    def admit(self, client: str, place: Place, made: bytes) -> Iterator[str]:
        """An upload: written, acknowledged, and then an event."""
        known = self.ledger.updates.get(place, {}).get(client)
        if known is None and self.state.undecided(place, client) and not self.state.not_wanted(place, client):
            for step in self.order_of_uploads:
                rows: Any = self.ledger.updates.setdefault(place, {}) if step == "write" else self.told.acknowledged
                rows[client if step == "write" else (*place, client)] = made
                self.ledger.arrived += [(place[0], client)] * (step == "write")
                yield f"update: {step}"
            yield from self.take(ev.UpdateAdmitted(client, made))
        elif known is not None and place[0] >= len(self.ledger.commits):
            self.told.acknowledged.setdefault((*place, client), known)

    def answer(self, client: str, asked: Asked) -> Iterator[str]:
        """An answer to a stage of secure aggregation: written, and then an event."""
        if core_stages.answered(self.ledger, self.state, asked, client):
            yield "answer written"
            yield from self.take(ev.StageAnswered(client))

    def refuse(self, client: str, place: Place, fault: ev.Fault) -> Iterator[str]:
        """An upload that is refused."""
        if self.state.undecided(place, client) and not self.state.not_wanted(place, client):
            self.ledger.refused.setdefault(place, {})[client] = Refused(fault, "bad")
            yield "refusal written"
            yield from self.take(ev.UpdateRefused(client, fault, "bad"))

    def fail(self, client: str, place: Place, *, not_finite: bool) -> Iterator[str]:
        """The work of a client failed."""
        if place == self.state.place_of(client) and self.state.works(client):
            event = ev.WorkFailed(client, "it failed", not_finite=not_finite)
            self._write_failure(client, "it failed", not_finite=not_finite)
            yield "failure written"
            yield from self.take(event)

    def restart_client(self, client: str, place: Place) -> Iterator[str]:
        """Another process of a client at work is here."""
        if place == self.state.place_of(client) and self.state.works(client):
            processes = self.ledger.processes.setdefault(place, {})
            processes[client] = processes.get(client, 0) + 1
            yield "restart written"
            yield from self.take(ev.ClientRestarted(client))
            same, most = place == self.state.place_of(client), self.state.policy.most_processes
            had = self.ledger.processes.get(place, {}).get(client, 0)  # 0 if the round was redrawn
            again = same and 0 < most <= had and self.state.works(client)
            assert not again, f"work goes to few processes of a daemon: {had} of {client} got it"

    def lose_state(self, client: str, place: Place) -> Iterator[str]:
        """A client at work has lost its state."""
        if place == self.state.place_of(client) and self.state.works(client):
            if self.state.policy.population:
                self.ledger.lost[client] = Lost("its disk is new", left_out=False)
                yield "lost state written"
            yield from self.take(ev.StateLost(client, "its disk is new"))

    def _write_failure(self, client: str, why: str, *, not_finite: bool = False) -> None:
        place = self.state.place_of(client)
        known = self.ledger.failed.setdefault(place, {}).pop(client, None)
        times = known.times + 1 if known else 1
        self.ledger.failed[place][client] = Failed(why, "", not_finite, times=times)

    # Long work. Each piece ends with an event.

    def finish(self, work: str) -> Iterator[str]:
        """The end of a piece of long work."""
        ledger, state = self.ledger, self.state
        kind, _, number = work.partition(" ")
        if kind == "reduce":
            yield from self.take(ev.ExchangeReduced())
        elif kind == "graph":
            if state.phase is Phase.SHARING:
                members = self.ledger.stages[state.round][-1].members
                yield from self.take(ev.GraphMade(core_stages.graph_of(state.policy, members)))
        elif kind == "gone":
            yield from self.take(ev.ClientDroppedOut(number))
        elif kind == "step":
            self.counted[state.round] = self.compute()
            yield from self.take(ev.StepComputed())
        elif kind == "commit":
            yield "checkpoint written"
            fixed = ledger.fixed[state.round, state.exchange]
            assert fixed == state.accepted, f"commits are of the fixed list: {state.accepted}, not {fixed}"
            assert state.state_epoch == ledger.epoch, f"commits are of the epoch: {state.state_epoch}"
            ledger.commits.append((self.counted[state.round], fixed, ledger.epoch, state.over_selection))
            for client, _ in fixed:
                ledger.lost.pop(client, None)
            yield "commit written"
            yield from self.take(ev.ModelCommitted(any(each.startswith("evaluate") for each in self.work)))
        elif kind == "evaluate":
            metrics = {"loss": int.from_bytes(digest("loss", state.policy.seed, number)) % 1000 / 1000}
            ledger.metrics[int(number)] = metrics
            yield "metrics written"
            yield from self.take(ev.Evaluated("server", int(number), metrics))
        else:
            ledger.by_clients.add(int(number))
            yield "clients' metrics written"
            yield from self.take(ev.Evaluated("clients", int(number)))

    def compute(self) -> bytes:
        """The model of the fixed list."""
        state, ledger = self.state, self.ledger
        if state.policy.buffered:
            return core_buffer.model_of_step(ledger, state.round)
        return digest(ledger.model, ledger.fixed[state.round, state.exchange])

    # Effects.

    order, order_of_uploads = ("write", "act", "send"), ("write", "acknowledge")

    def carry_out(self, effect: fx.Effect) -> Iterator[str]:
        """Write, act, send. A kill can come after each that did something."""
        for step in self.order:
            if getattr(self, step)(effect):
                yield step

    def write(self, effect: fx.Effect) -> bool:
        """What the ledger has of an effect. Returns whether there is something, as `act` and `send` do."""
        ledger, place = self.ledger, (self.state.round, self.state.exchange)
        match effect:
            case fx.OpenAttempt(round_, exchange, attempt, cohort):
                rows = ledger.attempts.setdefault(round_, [])
                assert rows or not ledger.paused, f"no round begins in a pause: round {round_}"
                if (exchange, attempt) not in [row[:2] for row in rows]:
                    rows.append((exchange, attempt, cohort))
                    ledger.charged += [(round_, attempt)] * self.state.policy.private
                self._gives(core_stages.STAGE_S if self.state.policy.secure else DEADLINE_S)
            case fx.OpenStage(stage=stage):
                core_stages.open_stage(ledger, self.told, effect)
                self._gives(DEADLINE_S if stage == Phase.COLLECTING.value else core_stages.STAGE_S)
            case fx.RecordFailure(client, why):
                self._write_failure(client, why)
            case fx.ReduceExchange(accepted) | fx.ComputeStep(accepted):
                known = ledger.fixed.get(place)
                assert known in (None, accepted), f"one list is fixed: {accepted} after {known} in {place}"
                core_stages.check_opened(ledger, self.told, self.state, accepted)
                ledger.fixed[place], ledger.versions[place] = accepted, getattr(effect, "versions", ())
            case fx.DropCulprits():
                self._drop(effect)
            case fx.RestartRound():
                self._restart(effect)
            case fx.EndRun(status, reason):
                ledger.status, ledger.reason = status, reason
                if self.state.policy.buffered:
                    core_buffer.give_up(ledger)
            case _:
                return False
        return True

    def _gives(self, seconds: float) -> None:
        self.deadline = None  # that of the attempt or stage before: its time left is not written any more
        self.ledger.seconds_left, self.told.opened, self.told.gives = seconds, self.clock.up, seconds

    def _drop(self, effect: fx.DropCulprits) -> None:
        ledger, place = self.ledger, (effect.round, effect.exchange)
        for (client, why), of in zip(effect.culprits, self._places(effect), strict=True):
            ledger.updates[of].pop(client)
            ledger.refused.setdefault(of, {})[client] = Refused("not_finite", why)
            self.told.acknowledged.pop((*of, client), None)
        ledger.fixed.pop(place)

    @staticmethod
    def _places(effect: fx.DropCulprits) -> list[Place]:
        rounds = effect.versions or (effect.round,) * len(effect.culprits)
        return [(round_, effect.exchange) for round_ in rounds]

    def _restart(self, effect: fx.RestartRound) -> None:
        ledger, epoch = self.ledger, effect.state_epoch
        self._forget_round(effect.round)
        core_stages.forget(ledger, effect.round, effect.past_draws)
        assert epoch == ledger.epoch + effect.states, f"epochs follow each other: {epoch} after {ledger.epoch}"
        if effect.states:
            ledger.epoch = epoch
            ledger.lost.clear()

    def _forget_round(self, round_: int) -> None:
        ledger = self.ledger
        ledger.restarts.add(round_)
        ledger.attempts.pop(round_, None)
        for rows in (ledger.updates, ledger.refused, ledger.failed, ledger.processes, ledger.fixed):
            for place in [place for place in rows if place[0] == round_]:
                rows.pop(place)
        core_buffer.drop(ledger, round_)
        for key in [key for key in self.told.acknowledged if key[0] == round_]:
            del self.told.acknowledged[key]

    def act(self, effect: fx.Effect) -> bool:
        """What the process does."""
        match effect:
            case fx.OpenAttempt() | fx.OpenStage():
                self.deadline = None if self.state.policy.buffered else self.clock.now + self.told.gives
                if isinstance(effect, fx.OpenStage):
                    self.work.extend(core_stages.absent(effect, self.told))
                    self.work.extend(["graph"] * (effect.stage == Phase.SHARING.value))
            case fx.RetryLater():
                self.retries = True
            case fx.ReduceExchange():
                self.work.append("reduce")
            case fx.ComputeStep():
                self.work.append("step")
            case fx.Commit():
                self.work.append("commit")
            case fx.Announce(round_, evaluate, ask):
                self.work.extend([f"evaluate {round_}"] * evaluate + [f"ask {round_}"] * ask)
            case fx.EndRun():
                self.deadline, self.retries = None, False
            case _:
                return False
        return True

    def send(self, effect: fx.Effect) -> bool:
        """What clients are told."""
        match effect:
            case fx.OpenAttempt():
                for client in self.state.outstanding:
                    self.assign(client)
            case fx.SendWork(client):
                self.assign(client)
            case fx.OpenStage(members=members):
                for client in members:
                    core_stages.ask(self.ledger, self.told, self.state, client)
            case fx.Cancel(clients):
                for client in clients:
                    self.told.assigned.pop(client, None)
                    self.told.asked.pop(client, None)
            case fx.Announce(round_):
                assert round_ < len(self.ledger.commits), f"commits come before their news: not round {round_}"
            case fx.EndRun():
                self.told.assigned.clear()
                self.told.asked.clear()
            case _:
                return False
        return True

    def assign(self, client: str) -> None:
        """Send a client its work."""
        state, ledger = self.state, self.ledger
        if state.staged and state.works(client):
            core_stages.ask(ledger, self.told, state, client)
        if not (state.policy.buffered or core_stages.trains(state)) or not state.works(client):
            return
        round_, of = state.place_of(client)
        cohorts = [cohort for exchange, _, cohort in ledger.attempts.get(round_, []) if exchange == of]
        assert any(client in cohort for cohort in cohorts), f"cohorts are written before their work: not {client}"
        self.told.assigned[client] = (round_, of, state.state_epoch, core_buffer.model_of(ledger, round_))
        if state.phase is Phase.COLLECTING:
            core_stages.ask(ledger, self.told, state, client)
