"""A run from its configuration to its end, round by round, decided by the coordinator's own round state machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from fl_client.data import LocalTask
from fl_client.errors import WorkFailed
from fl_ops.simulate.federation import Contribution, Federation, one_thread
from fl_server import events as ev
from fl_server.admission import Refused
from fl_server.assignments import Place
from fl_server.client_metrics import has_evaluation, summary
from fl_server.engine import Snapshot
from fl_server.round_state import Phase, RoundState
from fl_server.rounds import advance
from fl_server.run_config import RunConfig
from fl_server.sampling import by_id, draw_evaluators, ticket
from fl_server.step import Diverged
from fl_server.stop_rules import Evaluation, StopPolicy, stop_reason
from tasks import Task

FAILURES_KEPT = 100


@dataclass(frozen=True, slots=True)
class RoundResult:
    """A committed round."""

    round: int
    accepted: tuple[str, ...]
    """Clients whose updates made the model, in the order of id bytes."""
    dropped: int
    """Clients that were drawn and are not among them."""
    attempts: int
    training_loss: float | None
    """Mean over the accepted clients of the mean loss of their steps."""
    metrics: Mapping[str, float]
    """Of the server's evaluation and the clients'; empty where none was due."""
    bytes_down: int
    """Tensor bytes that the wire would have carried since the round before."""
    bytes_up: int
    seconds: float
    """Of local training, step and evaluation together."""
    digest: str
    """Of the model after the round, as a coordinator's ledger has it."""


class Simulation:
    """One run; use it in a with block, and go through `rounds()` once.

    Args:
        config: the run, as `fl run create` takes it. Labels are not looked at.
        clients: every client of the run by id: its task, fingerprint and data.
        seed: in place of the configuration's.
        task: what the first model comes from and what evaluates; by default the first client's task.

    Raises:
        AlgorithmError, InvalidInput, TaskError: what the coordinator would refuse too.
    """

    def __init__(
        self,
        config: RunConfig,
        clients: Mapping[str, LocalTask],
        *,
        seed: int | None = None,
        task: Task | None = None,
    ) -> None:
        self.config = config if seed is None else config.model_copy(update={"seed": seed})
        self._members = by_id(clients)
        task = task or clients[self._members[0]].task
        self.federation = Federation(self.config, task, clients)
        algorithm = self.federation.engine.algorithm
        population = self.config.population if algorithm.needs_population else 0
        self._state = RoundState(self.config.policy(len(algorithm.exchanges), population), self.config.stop.rounds)
        self._evaluations: list[Evaluation] = []
        self._finished: list[RoundResult] = []
        self._counted: list[Contribution] = []
        self._closed: RoundState = self._state
        self._refused: set[str] = set()
        self._roster_changed = False
        self._began = self._round_began = time.monotonic()
        self.failures: list[str] = []
        """Why clients did not deliver, the latest last; the oldest are forgotten."""

    def __enter__(self) -> Self:
        self.federation.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.federation.__exit__(kind, error, at)

    @property
    def snapshot(self) -> Snapshot:
        """The latest committed model; the first one before any."""
        return self.federation.snapshot

    @property
    def ending(self) -> tuple[ev.EndStatus, str] | None:
        """("completed" or "failed", why) once the run has come to its end."""
        return self._state.ending if self._state.phase is Phase.ENDED else None

    def model(self) -> dict[str, torch.Tensor]:
        """The latest model's whole state_dict."""
        return self.federation.model()

    def rounds(self) -> Iterator[RoundResult]:
        """Do the run; each round is yielded when it is committed and evaluated. Raises TaskError from evaluations."""
        self._began = self._round_began = time.monotonic()
        self._take(ev.RosterChanged(self._members, settled=True))
        while self._state.phase is not Phase.ENDED:
            self._take(self._time_is_over() or self._go_on())
            if self._finished:
                yield self._finished.pop()
                self._round_began = time.monotonic()

    def _take(self, event: ev.Event) -> None:
        self._state, commands = advance(self._state, event)
        for command in commands:
            match command:
                case ev.DropCulprits():
                    self._drop(command)
                case ev.RestartRound():
                    self.federation.give_up()
                case ev.Announce():
                    self._announce(command)
        if self._roster_changed:
            self._roster_changed = False
            self._tell_roster()

    def _go_on(self) -> ev.Event:
        """Do what the phase is for; what came of it."""
        state, accepted = self._state, [client for client, _ in self._state.accepted]
        match state.phase:
            case Phase.COLLECTING:
                return self._collect()
            case Phase.REDUCING:
                return self._compute(accepted, lambda: self.federation.reduce(state.exchange, accepted))
            case Phase.STEPPING:
                return self._compute(accepted, lambda: self.federation.step(accepted))
            case Phase.COMMITTING:
                self._commit(accepted)
                return ev.Committed()
            case Phase.EVALUATING:
                reason = self._reason_to_stop()
                return ev.EndRequested("completed", reason) if reason else ev.Evaluated(min(state.awaited))
            case _:
                return ev.EndRequested("failed", self._why_stuck())

    def _collect(self) -> ev.Event:
        """Let one client work; those of a cohort come in a random order, so that over-selection favours nobody."""
        state = self._state
        client = min(state.outstanding, key=lambda one: ticket("arrival", self.config.seed, state.round, one))
        place = Place(state.round, state.exchange, state.attempt, self.config.round.deadline_s)
        try:
            return ev.UpdateAdmitted(client, self.federation.work(place, client).digest)
        except Refused as refusal:
            # The refusal stands for the round, so the client is not drawn for it again.
            self._refused.add(client)
            self._tell_roster()
            why = str(refusal)
        except WorkFailed as failure:
            why = str(failure)
        self._failed(state.round, client, why)
        return ev.ClientOut(client)

    def _tell_roster(self) -> None:
        eligible = tuple(client for client in self._members if client not in self._refused)
        self._take(ev.RosterChanged(eligible, settled=True))

    def _compute(self, accepted: list[str], compute: Callable[[], None]) -> ev.Event:
        """Reduce or step, if no update spoils it."""
        exchange = self._state.exchange
        if found := self.federation.culprits(exchange, accepted):
            return ev.CulpritsFound(found)
        try:
            compute()
        except Diverged as error:
            found = self.federation.culprits(exchange, accepted, overflow=True)
            return ev.CulpritsFound(found) if found else ev.EndRequested("failed", str(error))
        return ev.ExchangeReduced() if self._state.phase is Phase.REDUCING else ev.Stepped()

    def _drop(self, command: ev.DropCulprits) -> None:
        """Who spoiled the round is not drawn for it again, as after a refusal."""
        for client, why in command.culprits:
            self._refused.add(client)
            self._failed(command.round, client, why)
        self._roster_changed = True

    def _failed(self, round_: int, client: str, why: str) -> None:
        self.failures = [*self.failures, f"round {round_}, {client}: {why}"][-FAILURES_KEPT:]

    def _commit(self, accepted: list[str]) -> None:
        self._counted, self._closed = self.federation.commit(accepted), self._state
        if self._refused:
            self._refused.clear()
            self._tell_roster()

    def _announce(self, announce: ev.Announce) -> None:
        """A round is committed: evaluate it where that is due, and say what it came to."""
        snapshot, closed = self.federation.snapshot, self._closed
        metrics = {
            **(self._evaluate(snapshot) if announce.evaluate else {}),
            **(self._ask_clients(snapshot) if announce.ask_clients else {}),
        }
        if has_evaluation(metrics, self.config.stop.metric):
            self._evaluations.append((snapshot.round, metrics))
        losses = [one.training_loss for one in self._counted if one.training_loss is not None]
        down, up = self.federation.wire.read()
        result = RoundResult(
            round=snapshot.round,
            accepted=tuple(one.info.client_id for one in self._counted),
            dropped=len(closed.drawn) - len(closed.accepted),
            attempts=closed.attempt + 1,
            training_loss=sum(losses) / len(losses) if losses else None,
            metrics=metrics,
            bytes_down=down,
            bytes_up=up,
            seconds=time.monotonic() - self._round_began,
            digest=self.federation.digest,
        )
        self._finished.append(result)

    def _evaluate(self, snapshot: Snapshot) -> Mapping[str, float]:
        with one_thread():
            return self.federation.engine.evaluate(snapshot)

    def _ask_clients(self, snapshot: Snapshot) -> Mapping[str, float]:
        """What the clients that have a held-out part say of the model; one that fails is passed over."""
        pool = [client for client in self._members if len(self.federation.clients[client].held_out)]
        answers = []
        for client in draw_evaluators(pool, self.config.evaluation.clients, self.config.seed, snapshot.round):
            with suppress(WorkFailed):
                answers.append(self.federation.evaluate(client))
        return summary(answers)

    def _reason_to_stop(self) -> str | None:
        stop = self.config.stop
        return stop_reason(StopPolicy(stop.metric, stop.target, stop.patience), self._evaluations)

    def _time_is_over(self) -> ev.Event | None:
        limit = self.config.stop.wall_time_s
        over = limit and time.monotonic() - self._began >= limit and self._state.ending is None
        return ev.EndRequested("completed", f"its {limit:g} s are over") if over else None

    def _why_stuck(self) -> str:
        """A coordinator would wait for clients; here nobody will come."""
        if self.failures:
            return f"too few clients could deliver; the last one that could not: {self.failures[-1]}"
        return f"expected {self._state.policy.min_clients} clients or more, there are {len(self._members)}"
