"""Evaluation on clients: which clients are asked about a committed model, their answers, and when it is over.

It continues during later rounds and after the run's end, and it reserves no client. It is over when every asked client
has answered, has failed or is gone, or at its deadline; then the answers that came are summarised. After a restart the
latest round's clients are asked again, except those with an answer in the ledger; earlier rounds are summarised from
the answers in the ledger.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from fl_server.aggregation.outgoing import Broadcast
from fl_server.errors import InvalidInput
from fl_server.rounds.collecting import too_many_processes
from fl_server.rounds.metrics import EVALUATED, summary, with_own
from fl_server.rounds.sampling import draw_evaluators
from fl_server.run.client_warnings import warn_of_label_order
from fl_server.run.context import RunContext
from fl_server.run.control import RunControl, with_turns
from fl_server.run.evaluations import check_report, plain_sums, prune_checkpoints, record_metrics, with_sums
from fl_server.run.failures import time_left_written
from fl_server.store.records import ClientEvaluation
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.tensor_pb2 import Resource
from protos.fl.v1.training_pb2 import EvaluationAssignment, ExchangeKey, TaskFingerprint

log = structlog.get_logger()

AT_ONCE = 2
"""Rounds that are evaluated at a time: each holds a model. One more ends the oldest before its deadline."""


@dataclass(slots=True)
class _Evaluation:
    """The evaluation of one round."""

    round: int
    broadcasts: tuple[Broadcast, ...]
    """What its clients fetch; shared with rounds that send the same."""
    asked: frozenset[str]
    outstanding: set[str]
    answered: set[str]
    """Clients with an answer in the ledger: a repeat is not written again."""
    ends: float
    """When it ends, by the monotonic clock."""
    local_frozen: Resource | None = None
    """The frozen parameters that its clients have themselves."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    processes: dict[str, set[str]] = field(default_factory=dict)
    """The processes of each client's daemon that were asked, by client; since the coordinator's start."""

    def client_out(self, client: str) -> None:
        """Stop waiting for the client."""
        self.outstanding.discard(client)
        if not self.outstanding:
            self.over.set()


class ClientEvaluations:
    """The clients' evaluations of one run. Lives on the event loop."""

    def __init__(self, context: RunContext, control: RunControl) -> None:
        self._context, self._control = context, control
        self._under_way: dict[int, _Evaluation] = {}

    def broadcasts(self) -> Iterable[Broadcast]:
        """What clients can fetch for the evaluations under way."""
        return (broadcast for one in self._under_way.values() for broadcast in one.broadcasts)

    async def start(self, round_: int, seconds: float) -> None:
        """Ask clients about the latest model, which this round made; they have so many seconds."""
        context = self._context
        answered = {answer.client_id for answer in await self._read_answers(round_)}
        asked = self._draw(round_, answered)
        broadcasts = tuple(broadcast for broadcast in context.model.broadcasts if broadcast.kind != "direction")
        if asked and self._control.config.evaluation.averaged_on_clients:
            broadcasts += await self._control.retry(context.model.averaged_broadcast)
        one = _Evaluation(
            round=round_,
            broadcasts=broadcasts,
            asked=frozenset(asked) | answered,
            local_frozen=context.model.local_frozen,
            outstanding=set(asked),
            answered=answered,
            ends=time.monotonic() + seconds,
        )
        for older in sorted(self._under_way)[: -(AT_ONCE - 1)]:
            self._under_way[older].over.set()
        self._under_way[round_] = one
        context.rounds.being_evaluated[round_] += 1
        log.info("evaluation_asked", run=context.run_id, round=round_, clients=len(asked), answered=len(answered))
        message = self._assignment(one)
        async for client in with_turns(() if self._control.draining else asked):
            self._ask(one, client, message)
        self._control.spawn(self._wait_and_summarise(one))

    def _draw(self, round_: int, answered: set[str]) -> tuple[str, ...]:
        config = self._control.config
        wanted = config.evaluation.clients
        if wanted and wanted <= len(answered):
            return ()
        eligibility = self._context.fleet.eligibility
        pool = set(eligibility.evaluators(self._context.task, config.labels)) - answered
        pool -= eligibility.policy.of(self._context.run_id, "evaluation").keys()
        return draw_evaluators(pool, wanted and wanted - len(answered), config.seed, round_)

    def _assignment(self, one: _Evaluation) -> pb.AttendResponse:
        version, source = self._context.fingerprint
        message = EvaluationAssignment(
            key=ExchangeKey(run_id=self._context.run_id, round=one.round),
            task=self._context.task["name"],
            fingerprint=TaskFingerprint(version=version, source=source),
            resources=[broadcast.resource for broadcast in one.broadcasts],
            local_frozen=one.local_frozen,
            personal=self._control.config.personal,
        )
        message.deadline.FromMilliseconds(max(0, round((one.ends - time.monotonic()) * 1000)))
        return pb.AttendResponse(evaluation=message)

    async def _wait_and_summarise(self, one: _Evaluation) -> None:
        if one.outstanding:
            with suppress(TimeoutError):
                async with asyncio.timeout(one.ends - time.monotonic()):
                    await one.over.wait()
        del self._under_way[one.round]
        if one.outstanding:
            log.warning(
                "evaluation_incomplete", run=self._context.run_id, round=one.round, missing=len(one.outstanding),
                first=min(one.outstanding),
            )  # fmt: skip
        await self._summarise(one.round)
        self._context.rounds.being_evaluated[one.round] -= 1
        if self._control.ended:
            await self.send_run_ended()
            await prune_checkpoints(self._context, self._control)

    async def _summarise(self, round_: int) -> None:
        """Summarise the answers in the ledger, which are also the ones that operators see."""
        answers = await self._read_answers(round_)
        metrics = summary([(answer.num_examples, answer.metrics) for answer in answers], self._context.directions)
        metrics = await with_sums(self._context, self._control, round_, metrics)
        await warn_of_label_order(self._context, self._control, answers)  # first: with the metrics the run may end
        await record_metrics(self._context, self._control, round_, metrics, "clients")

    async def backfill(self) -> None:
        """Summarise earlier rounds after a restart, from the answers in the ledger. Their models are not sent again."""
        context, every = self._context, self._control.config.ask_clients_every
        if every and (newest := context.rounds.newest_round_with(EVALUATED)) is not None and not self._control.ended:
            before = await self._read_answers(newest - every) if newest >= every else []
            context.label_order.restore(before, await self._read_answers(newest))
        for round_ in sorted(context.rounds.being_evaluated):
            latest = round_ == context.rounds.committed - 1
            if every and (self._control.ended if latest else (round_ + 1) % every == 0):
                await self._summarise(round_)
            del context.rounds.being_evaluated[round_]

    async def save_times(self) -> None:
        """Write the time left of the evaluations under way, for a restart."""
        context = self._context
        for one in list(self._under_way.values()):
            method, left = context.store.set_clients_seconds_left, max(0.0, one.ends - time.monotonic())
            with time_left_written(context):
                await context.services.ledger.do(method, context.run_id, one.round, left)

    async def answers(self, round_: int) -> list[ClientEvaluation]:
        """The clients' answers for a round, in the order of id bytes."""
        return await self._context.services.ledger.do(self._context.store.evaluations, self._context.run_id, round_)

    async def _read_answers(self, round_: int) -> list[ClientEvaluation]:
        """The same, with retries until the ledger can be read."""
        return await self._control.retry(lambda: self.answers(round_))

    def outstanding(self, round_: int) -> tuple[frozenset[str], float | None]:
        """The clients that have not answered about a round, and the seconds until its deadline; None if it is over."""
        one = self._under_way.get(round_)
        return (frozenset(one.outstanding), max(0.0, one.ends - time.monotonic())) if one else (frozenset(), None)

    def newest(self) -> int | None:
        """The newest round that clients were asked about; None before the first."""
        evaluated = self._context.rounds.newest_round_with(EVALUATED)
        return max((*self._under_way, *(() if evaluated is None else (evaluated,))), default=None)

    def awaits(self, client: str) -> bool:
        """Whether a client is asked for an evaluation that it has not made yet."""
        return any(client in one.outstanding for one in self._under_way.values())

    async def send_run_ended(self) -> None:
        """Tell clients that the run is over, so that they remove its updates and states.

        A client that still evaluates needs its state, and is told when that is over. One that is away, or does not get
        the message, asks when it attends again.
        """
        async for client in with_turns(self._context.fleet.attendance.roster.present()):
            self.tell_end(client)

    def tell_end(self, client: str) -> None:
        """Tell a client that the run is over, if it is, unless the client still evaluates."""
        if self._control.ended and not self.awaits(client):
            message = pb.AttendResponse(run_ended=pb.RunEnded(run_id=self._context.run_id))
            self._context.fleet.streams.push(client, message)

    # What clients do.

    async def report(self, client: str, request: pb.ReportEvaluationRequest) -> None:
        """Store a client's answer. The first answer stands. A late answer is ignored, because it is no fault.

        Raises InvalidInput for invalid values, and for an evaluation that the client was not asked for.
        """
        check_report(request, self._control.config)
        run_id, one = self._context.run_id, self._under_way.get(request.key.round)
        if one is None and self._was_due(request.key.round):
            log.debug("evaluation_late", run=run_id, round=request.key.round, client=client)
            return
        if one is None or client not in one.asked or request.key.exchange:
            came = f"round {request.key.round}, exchange {request.key.exchange} of {run_id} by {client}"
            raise InvalidInput("key", "an evaluation that this client was asked for", came)
        if client in one.answered:
            return
        metrics = with_own(request.metrics, request.without_personal)
        sums = plain_sums(request)
        answer = ClientEvaluation(run_id, one.round, client, request.num_examples, metrics, time.time(), sums)
        await self._control.write(self._context.store.record_evaluation, answer)
        one.answered.add(client)
        one.client_out(client)

    def _was_due(self, round_: int) -> bool:
        return bool(self._control.config.ask_clients_every) and round_ < self._context.rounds.committed

    def client_attached(self, client: str) -> None:
        """A client attached: send it the evaluations that it still has to make, and the end of the run."""
        for one in self._under_way.values():
            if client in one.outstanding and not self._restarts_too_often(one, client):
                self._ask(one, client, self._assignment(one))

    def _ask(self, one: _Evaluation, client: str, message: pb.AttendResponse) -> None:
        if process := self._context.fleet.attendance.process_of(client):
            one.processes.setdefault(client, set()).add(process)
        if data := self._control.eligible.data_of(client):
            shared, message = message, pb.AttendResponse()
            message.CopyFrom(shared)
            message.evaluation.data = data
        self._context.fleet.streams.push(client, message)

    def _restarts_too_often(self, one: _Evaluation, client: str) -> bool:
        """Whether the client's daemon ended in this evaluation so often that it is not waited for any longer."""
        fleet, most = self._context.fleet, self._context.services.config.quarantine.restarts
        others = one.processes.get(client, set()) - {fleet.attendance.process_of(client)}
        if not 0 < most <= len(others):
            return False
        why = too_many_processes(most, f"evaluation of round {one.round}")
        log.warning("client_failed", run=self._context.run_id, round=one.round, client=client, why=why)
        self._control.spawn(fleet.records.write_note(client, why))
        one.client_out(client)
        return True

    def client_gone(self, client: str) -> None:
        """A client is lost, banned or forgotten."""
        for one in self._under_way.values():
            one.client_out(client)

    def client_failed(self, key: ExchangeKey, client: str) -> bool:
        """A client gave up its evaluation of a round. Returns False if it was not waited for."""
        one = self._under_way.get(key.round)
        if one is None or key.exchange or client not in one.outstanding:
            return False
        one.client_out(client)
        return True
