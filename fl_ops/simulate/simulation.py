"""Simulates a run from its configuration to its end, driven by the coordinator's round state machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Self

import torch

from fl_client.training.data import LocalTask
from fl_common.secure_aggregation.errors import PlanError
from fl_common.secure_aggregation.plan import plan_of
from fl_common.units import counted
from fl_ops.simulate.buffered_run import BufferedRun
from fl_ops.simulate.engine_choice import SEQUENTIAL, EngineOptions
from fl_ops.simulate.evaluations import Collection, Evaluations
from fl_ops.simulate.federation import Federation
from fl_ops.simulate.measures.section import MeasureSection
from fl_ops.simulate.reports import Failure, Note, RoundResult, Step
from fl_ops.simulate.round_report import RoundReport, Undelivered
from fl_ops.simulate.saving.point import RunPoint, before_draw, judged
from fl_ops.simulate.system.devices import Devices
from fl_ops.simulate.system.simulated_time import SimulatedTime
from fl_ops.simulate.updates import Contribution, NotDelivered
from fl_server.aggregation.privacy import seed_of_draws
from fl_server.aggregation.secure_aggregation import SpoiledSum, settings_of
from fl_server.aggregation.server_update import Diverged
from fl_server.aggregation.snapshot import Snapshot
from fl_server.errors import InvalidInput
from fl_server.privacy_accounts import Account
from fl_server.rounds import effects
from fl_server.rounds import events as ev
from fl_server.rounds.events import Graph
from fl_server.rounds.machine import advance, applies
from fl_server.rounds.sampling import RoundPolicy, by_id
from fl_server.rounds.state import STAGES, Phase, RoundState
from fl_server.run_settings.config import RunConfig
from fl_tasks import Task


class Simulation:
    """One run; a context manager. Iterate over `rounds()` once.

    Args:
        config: the run, as for `fl run create`. Labels are ignored.
        clients: every client of the run by id: its task, fingerprint and data.
        seed: overrides the configuration's seed.
        task: the server's task, for the first model and for evaluation; by default the first client's task.
        notify: called before each step of work and after each failure of a client.
        engine: how the clients' work is done. On a CPU the models do not depend on it.
        devices: of the clients, for simulated time. None: clients arrive in a random order, and deadlines do not pass.
        digests: whether each round's result has the digest of its model. None: on a CPU.
        measure: what is measured beyond the run's evaluations.
        secret: of a private run, for its cohorts and noise; by default it follows from the seed.

    Raises:
        AlgorithmError, InvalidInput, TaskError: the coordinator would refuse the run, too.
    """

    def __init__(
        self,
        config: RunConfig,
        clients: Mapping[str, LocalTask],
        *,
        seed: int | None = None,
        task: Task | None = None,
        notify: Callable[[Step | Failure | Note], None] = lambda _: None,
        engine: EngineOptions = SEQUENTIAL,
        devices: Devices | None = None,
        digests: bool | None = None,
        measure: MeasureSection | None = None,
        secret: bytes = b"",
    ) -> None:
        self.config = config if seed is None else config.model_copy(update={"seed": seed})
        self._notify = notify
        self._members = by_id(clients)
        task = task or clients[self._members[0]].task
        self._digests = engine.device.type == "cpu" if digests is None else digests
        _check_engine(self.config, engine)
        self.federation = Federation(self.config, task, clients, engine, digests=self._digests, secret=secret)
        self.config = self.federation.config  # with the direction of its metric
        self._time = None if devices is None else SimulatedTime(devices, self.federation)
        self._collection = Collection(self.federation, self._time)
        self._buffered = BufferedRun(self.federation, self._time) if self.config.round.close == "buffer" else None
        self.account = None if self.config.client_privacy is None else Account.of("", self.config, ()).check()
        """The privacy account of a private run, to which nothing else was charged."""
        self._state = RoundState(self._policy(), self.config.stop.rounds, wall_time_s=self.config.stop.wall_time_s)
        self._evaluations = Evaluations(self.federation, self._members, self._time, measure)
        self._measure = measure
        self._finished: list[RoundResult] = []
        self._metrics: Mapping[str, float] = {}
        """The metrics of the latest evaluation."""
        self._engine_report, self._roster_changed, self._earlier_s = "", False, 0.0
        self._started = self._began = time.monotonic()
        self.point: RunPoint | None = None
        """What to save now: the run after its last round, or after its end. None during a commit and its evaluation."""
        self._undelivered = Undelivered(notify)
        clock = None if self._time is None else self._time.clock
        self._report = RoundReport(self.federation, self._undelivered, clock)

    def _policy(self) -> RoundPolicy:
        algorithm = self.federation.engine.algorithm
        population = self.config.population if algorithm.needs_population else 0
        policy = self.config.policy(len(algorithm.exchanges), population)
        if self.account is None:
            return policy
        return replace(policy, seed=seed_of_draws(self.federation.secret), most_draws=self.account.most)

    def __enter__(self) -> Self:
        self.federation.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.federation.__exit__(*error)

    @property
    def failures(self) -> list[str]:
        """Why clients delivered no update, the latest last; at most FAILURES_KEPT."""
        return self._undelivered.latest

    @property
    def snapshot(self) -> Snapshot:
        """The latest committed model; before the first commit, the initial model."""
        return self.federation.snapshot

    @property
    def ending(self) -> tuple[ev.EndStatus, str] | None:
        """("completed" or "failed", reason) once the run has ended."""
        return self._state.ending if self._state.phase is Phase.ENDED else None

    @property
    def diverged(self) -> bool:
        """Whether the run failed because values were not finite."""
        return self._state.failed_by == "not_finite"

    def model(self) -> dict[str, torch.Tensor]:
        """The latest model's whole state_dict."""
        return self.federation.model()

    def averaged_model(self) -> dict[str, torch.Tensor] | None:
        """The averaged model's whole state_dict; None if the run has none, or none yet."""
        return self.federation.averaged_model()

    def rounds(self) -> Iterator[RoundResult]:
        """Run to the end; yields each round once it is committed and evaluated. Raises TaskError from evaluations."""
        self._started = time.monotonic()
        self._began = self._started - self._earlier_s
        self._report.begin()
        self._update_roster()
        self._count_time()
        while self._state.phase is not Phase.ENDED:
            self._apply(self._do_phase())
            self._count_time()
            if self._finished:
                # A run with a buffer has work under way between two rounds, which no point has.
                self.point = self._point() if self._buffered is None else None
                yield self._finished.pop()
                self._report.begin()
        self.point = self._point()

    @property
    def first_state(self) -> RoundState:
        """The state in which a run of these settings begins."""
        return RoundState(self._state.policy, self._state.rounds, wall_time_s=self._state.wall_time_s)

    def continue_from(self, point: RunPoint, earlier: Sequence[RoundResult]) -> None:
        """Put a new simulation where another one was, whose results were `earlier`; before `rounds()`.

        The caller restores the client states. What follows has the same bits as in the other simulation.
        """
        self.federation.continue_from(point.federation)
        self._state, self._earlier_s = point.state, point.seconds
        if self._time is not None and point.clock is not None:
            self._time.clock.continue_from(point.clock)
        self._undelivered.latest = [*point.failures]
        self.point = point
        if self._state.phase is not Phase.ENDED:
            self._state = judged(self._state, earlier)
        self._metrics = earlier[-1].metrics if earlier else {}

    def _point(self) -> RunPoint:
        seconds = time.monotonic() - self._began
        state = before_draw(self._state)
        clock = None if self._time is None else self._time.clock.point
        return RunPoint(self.federation.point, state, self.failures, seconds, clock)

    def with_last_measures(self, results: list[RoundResult]) -> None:
        """Measure the last round of a run that has ended well, unless that is done. Raises TaskError."""
        done = self.ending is not None and self.ending[0] == "completed"
        if self._measure is not None and done and results and not results[-1].measured:
            self._notify(Step(results[-1].round, "evaluation"))
            results[-1] = replace(results[-1], measured=self._evaluations.measured())

    def profile(self) -> dict[str, float]:
        """Seconds of this process by what they were used for, so far."""
        return self.federation.profile.seconds(time.monotonic() - self._started)

    def _apply(self, event: ev.Event) -> None:
        self._state, commands = advance(self._state, event)
        for command in commands:
            match command:
                case effects.DropCulprits():
                    self._undelivered.dropped(command)
                case effects.RestartRound():
                    self._collection.discard()
                    self.federation.discard_round()
                    self._undelivered.forget()
                case effects.Announce():
                    self._announce(command)
                case effects.OpenAttempt():
                    self._undelivered.begin(command)
                case effects.DeadlineMissed():
                    self._undelivered.late(command.clients, self._state)
            if self._buffered is not None:
                self._buffered.carry_out(command)
            elif self._time is not None:
                self._time.carry_out(command)
        if self._roster_changed:
            self._roster_changed = False
            self._update_roster()

    def _do_phase(self) -> ev.Event:  # noqa: PLR0911 - a table
        """Do the work of the current phase. Returns the event that it leads to."""
        state, accepted = self._state, [client for client, _ in self._state.accepted]
        if self._buffered is not None and (event := self._go_on(self._buffered, accepted)) is not None:
            return event
        match state.phase:
            case Phase.COLLECTING:
                return self._collect()
            case phase if phase in STAGES:
                return self._answer_stage()
            case Phase.REDUCING:
                updates = self.federation.accepted(state.exchange, accepted)
                return self._compute(updates, lambda: self.federation.reduce(state.exchange, accepted))
            case Phase.STEPPING:
                updates = self.federation.accepted(state.exchange, accepted)
                return self._compute(updates, lambda: self.federation.step(accepted, state.attempt))
            case Phase.COMMITTING:
                self._committed(self.federation.commit(accepted))
                return ev.ModelCommitted()
            case Phase.EVALUATING:
                return ev.Evaluated(min(state.awaited), metrics=self._metrics)
            case _ if state.resting and self._time is not None:
                return ev.RetryDue()
            case _:
                again = None if self._time is None else self._time.wait(state, self._usable())
                return again or ev.EndRequested("failed", self._too_few_clients())

    def _answer_stage(self) -> ev.Event:
        """The next answer to a stage of secure aggregation: all clients give it at once, and nothing is masked.

        Everybody holds shares of everybody's secrets here: the order of the circle is random in a run.
        """
        state, section = self._state, self.config.secure_aggregation
        if section is not None and state.phase is Phase.SHARING and state.graph is None:
            try:
                plan = plan_of(settings_of(section), len(state.drawn))
            except PlanError as error:
                return ev.RoundSpoiled(str(error))
            holders = dict.fromkeys(state.drawn, state.drawn)
            return ev.GraphMade(Graph(holders, plan.threshold, plan.quorum, plan.fewest))
        return ev.StageAnswered(min(state.unanswered, key=str.encode))

    def _go_on(self, run: BufferedRun, accepted: list[str]) -> ev.Event | None:
        """What happens next in a run with a buffer, as far as it is not as in others."""
        state = self._state
        match state.phase:
            case Phase.SELECTING | Phase.COLLECTING:
                return next((event for event in self._happening(run) if applies(event, state)), None)
            case Phase.STEPPING:
                updates = run.updates.of(accepted, state.versions)
                return self._compute(updates, lambda: run.updates.step(accepted, state.versions))
            case Phase.COMMITTING:
                self._committed(run.updates.commit(accepted, state.versions))
                return ev.ModelCommitted()
            case _:
                return None

    def _happening(self, run: BufferedRun) -> Iterator[ev.Event]:
        """What happens to the clients of a run with a buffer, as long as any of them works."""
        while (happens := run.go_on(self._state)) is not None:
            self._roster_changed = self._time is not None
            if isinstance(happens, str):
                yield self._result(run.updates.arrive(happens))
            else:
                if isinstance(happens, ev.ClientDroppedOut):
                    self._undelivered.gone(happens.client)
                yield happens

    def _collect(self) -> ev.Event:
        """What happens next in an open attempt; without simulated time, the results of clients' work."""
        if self._time is None:
            return self._event_of(self._collection.next_client(self._state), alone=False)
        happens = self._time.go_on()
        if isinstance(happens, ev.DeadlinePassed) or self._state.working == 1:
            self._update_roster()  # other clients may be drawn now
        if isinstance(happens, ev.ClientDroppedOut):
            self._undelivered.gone(happens.client)
        return self._event_of(happens) if isinstance(happens, str) else happens or ev.DeadlinePassed()

    def _event_of(self, client: str, *, alone: bool = True) -> ev.Event:
        """The result of the work of a client; not alone: the updates that follow its own, too."""
        state, drawn = self._state, len(self._state.drawn)
        self._notify(Step(state.round, "client", drawn - state.working + 1, drawn))
        result = self._collection.result(state, client)
        if (report := self.federation.engine_report) != self._engine_report:
            self._engine_report = report
            self._notify(Note(report))
        others = self._collection.following(state) if isinstance(result, Contribution) and not alone else []
        return self._result(result, others)

    def _result(self, result: Contribution | NotDelivered, others: Sequence[Contribution] = ()) -> ev.Event:
        """The event of a client's result. others: updates that come with its own."""
        if isinstance(result, Contribution):
            return ev.UpdateAdmitted(tuple((one.client, one.digest) for one in (result, *others)))
        return self._undelivered.failed(self._state, result)

    def _usable(self) -> tuple[str, ...]:
        """The clients that may be drawn for this round."""
        return tuple(client for client in self._members if not self._state.barred(client))

    def _update_roster(self) -> None:
        eligible = self._members if self._time is None else self._time.eligible(self._members)
        self._apply(ev.RosterChanged(eligible, settled=True))

    def _compute(self, updates: Sequence[Contribution], compute: Callable[[], None]) -> ev.Event:
        """Reduce or step, unless an update spoils it."""
        secure = self.config.secure_aggregation is not None  # nobody sees a single norm then
        if not secure and (culprits := self.federation.culprits(updates)):
            return ev.CulpritsFound(culprits, "norm")
        try:
            compute()
        except SpoiledSum as error:
            return ev.RoundSpoiled(str(error))
        except Diverged as error:
            culprits = self.federation.culprits(updates, overflow=True)
            return ev.CulpritsFound(culprits) if culprits else ev.ModelDiverged(str(error))
        return ev.ExchangeReduced() if self._state.phase is Phase.REDUCING else ev.StepComputed()

    def _committed(self, counted: Sequence[Contribution]) -> None:
        self.point = None
        self._report.committed(self._state, counted)
        if self._time is not None:
            self._time.commit()
            self._update_roster()

    def _announce(self, announce: effects.Announce) -> None:
        """Evaluate a committed round if that is due, and build its result."""
        if announce.evaluate or announce.ask_clients:
            self._notify(Step(self.federation.snapshot.round, "evaluation"))
        metrics = self._metrics = self._evaluations.measure(announce, awaited="clients" in self._state.awaited)
        self._roster_changed = self._roster_changed or (self._time is not None and announce.ask_clients)
        result = self._report.result(metrics, digests=self._digests)
        if self._measure is not None and self._measure.due(result.round):
            result = replace(result, measured=self._evaluations.measured())
        self._finished.append(result)

    def _count_time(self) -> None:
        if self._state.wall_time_s and self.ending is None:
            self._apply(ev.TimeUsed(time.monotonic() - self._began if self._time is None else self._time.clock.now))

    def _too_few_clients(self) -> str:
        """A coordinator would wait for more clients. A simulation has no others, so the run fails."""
        if self.failures:
            return f"too few clients could deliver; the last one that could not: {self.failures[-1]}"
        if self._time is not None:
            return (
                f"after {self._time.clock.now:.0f} s of simulated time, too few clients are available, "
                f"{len(self._state.candidates)} of "
                f"{len(self._members)}, and none of the others comes back in time"
            )
        return f"expected {counted(self._state.policy.min_clients, 'client')} or more, there are {len(self._members)}"


def _check_engine(config: RunConfig, engine: EngineOptions) -> None:
    """Raises InvalidInput for a run with a buffer whose clients would train together."""
    if config.round.close == "buffer" and (engine.batched is not None or engine.ranks is not None):
        expected = 'one at a time, in this process or in workers, for close = "buffer"'
        raise InvalidInput("round.close", f"clients that train {expected}", "clients in lockstep or in ranks")
