"""The effects in the driver of the core: write, act, send, in this order. A kill can come after each."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from fl_server.rounds import effects as fx
from fl_server.rounds.by_client import Failed, Refused
from fl_server.rounds.state import Phase, RoundState
from tests.deterministic import core_buffer, core_stages
from tests.deterministic.core_ledger import Clock, Ledger, Place, Told

DEADLINE_S = 500.0
"""Time of an attempt."""


class Effects:
    """What one process of the coordinator has, and what it does for the core."""

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

    def _write_failure(self, client: str, why: str, *, not_finite: bool = False) -> None:
        place = self.state.place_of(client)
        known = self.ledger.failed.setdefault(place, {}).pop(client, None)
        times = known.times + 1 if known else 1
        self.ledger.failed[place][client] = Failed(why, "", not_finite, times=times)
