"""A driver of the core without tensors, files and sessions. It keeps the contract of order: write, act, send.

Its ledger is a few dictionaries, and its steps are a generator: a kill between any two of them drops the generator and
all that is in memory. A model is the digest of the model before it and of its accepted list.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fl_server.rounds import events as ev
from fl_server.rounds import machine, restoring
from fl_server.rounds.by_client import ByClient, Lost, Refused
from fl_server.rounds.committing import clients_due, evaluation_due
from fl_server.rounds.metrics import Judged
from fl_server.rounds.restoring import SavedRound
from fl_server.rounds.state import Phase, RoundState, replace
from tests.deterministic import core_buffer, core_stages
from tests.deterministic.core_effects import Effects
from tests.deterministic.core_ledger import Asked, Place, digest


class Driver(Effects):
    """One process of the coordinator: its start, events, and long work."""

    # The start.

    def restore(self, present: frozenset[str]) -> Iterator[str]:
        """Restore the state, and continue."""
        ledger, policy, done = self.ledger, self.state.policy, len(self.ledger.commits)
        state = self._committed(done)
        if ledger.status != "running":
            self._restore_ended(state, done)
            return
        state = restoring.restored_round(state, self.saved(done))
        state = restoring.without_absent(state, present)
        evaluations = [(round_, found) for round_, found in ledger.metrics.items() if round_ >= ledger.judged_from]
        missing: set[ev.Source] = {"server"} if done - 1 in self._evaluate_again(state, done) else set()
        if done and clients_due(state, done - 1) and done - 1 not in ledger.by_clients:
            missing.add("clients")
            self.work.append(f"ask {done - 1}")
        self.state = restoring.with_evaluations(state, evaluations, Judged(), missing)
        if (self.state.phase is Phase.COLLECTING or self.state.staged) and not policy.buffered:
            self.deadline = self.clock.now + self.time_left()
        yield "restored"
        yield from self.take(ev.RoundRestored())

    def _committed(self, done: int) -> RoundState:
        """The state after the committed rounds, without what the ledger has of the round under way."""
        ledger, population = self.ledger, self.state.policy.population
        of_epoch = [number for number, commit in enumerate(ledger.commits) if commit[2] == ledger.epoch]
        counted = of_epoch if population else ()
        return replace(
            self.state, rounds=ledger.rounds, round=done, paused=ledger.paused, state_epoch=ledger.epoch,
            epoch_rounds=len(of_epoch), over_selection=ledger.commits[-1][3] if done else 0.0,
            members=frozenset(client for number in counted for client, _ in ledger.commits[number][1]),
            judged_from=ledger.judged_from, draws=self.draws(),
            lost=ByClient(ledger.lost) if population else ByClient(),
        )  # fmt: skip

    def _restore_ended(self, state: RoundState, done: int) -> None:
        attempts = self.ledger.attempts.get(done, [])
        self.state = replace(
            state, phase=Phase.ENDED, ending=(self.ledger.status, self.ledger.reason), goal=1 if attempts else 0,
            attempt=max((attempt for _, attempt, _ in attempts), default=0),
        )  # fmt: skip
        self._evaluate_again(replace(state, ending=None), done)

    def _evaluate_again(self, state: RoundState, done: int) -> list[int]:
        """Begin the evaluations that the kill cut off. Returns their rounds."""
        due = [number for number in range(done) if number not in self.ledger.metrics and evaluation_due(state, number)]
        self.work.extend(f"evaluate {number}" for number in due)
        return due

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
            yield from self.take(ev.UpdateAdmitted(((client, made),)))
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
