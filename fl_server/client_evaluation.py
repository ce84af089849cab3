"""Evaluation on clients: which of them are asked about a committed model, what they answer, and when that is over.

It goes on beside later rounds and beyond the run's end, and reserves nobody. It is over when everybody asked has
answered, has failed or is gone, or at its deadline; what came by then is summed up, whatever came. After a restart the
latest round's clients are asked again, but for those whose answers are in the ledger; earlier rounds come to what
their clients had said.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from fl_server.broadcast import Broadcast
from fl_server.client_metrics import EVALUATED, summary
from fl_server.deadline import keep
from fl_server.errors import InvalidInput
from fl_server.evaluation import prune, settle
from fl_server.ledger import until_room
from fl_server.sampling import draw_evaluators
from fl_server.store.base import ClientEvaluation
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import EvaluationAssignment, ExchangeKey, TaskFingerprint

if TYPE_CHECKING:
    from fl_server.run import Run

log = structlog.get_logger()

AT_ONCE = 2
"""Rounds that are evaluated at a time: each holds a model. With one more, the oldest is summed up before its time."""
MAX_METRICS = 64
MAX_NAME = 64
MAX_VALUE = 1e100
"""Larger is no measurement, and its square would not be finite."""


@dataclass(slots=True)
class _UnderWay:
    """One round's evaluation."""

    round: int
    broadcasts: tuple[Broadcast, ...]
    """Shared with the rounds that send the same: what its clients fetch."""
    asked: frozenset[str]
    outstanding: set[str]
    answered: set[str]
    """Their answers are in the ledger: a repeat is not written again."""
    ends: float
    """By the monotonic clock."""
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def out(self, client: str) -> None:
        """The client is not waited for any more."""
        self.outstanding.discard(client)
        if not self.outstanding:
            self.over.set()


class ClientEvaluations:
    """The clients' evaluations of one run. Lives on the event loop."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._under_way: dict[int, _UnderWay] = {}

    def broadcasts(self) -> Iterable[Broadcast]:
        """What can be fetched for them."""
        return (broadcast for one in self._under_way.values() for broadcast in one.broadcasts)

    async def begin(self, round_: int, seconds: float) -> None:
        """Ask clients about the latest model, which this round made, and give them so long."""
        run = self._run
        answered = {answer.client_id for answer in await self._answers_at_last(round_)}
        asked = self._draw(round_, answered)
        one = _UnderWay(
            round=round_,
            broadcasts=tuple(broadcast for broadcast in run.model.broadcasts if broadcast.kind != "direction"),
            asked=frozenset(asked) | answered,
            outstanding=set(asked),
            answered=answered,
            ends=time.monotonic() + seconds,
        )
        for older in sorted(self._under_way)[: -(AT_ONCE - 1)]:
            self._under_way[older].over.set()
        self._under_way[round_] = one
        run.log.under_way.add(round_)
        log.info("evaluation_asked", run=run.id, round=round_, clients=len(asked), answered=len(answered))
        question = self._question(one)
        for client in () if run.held else asked:
            run.parts.fleet.push(client, question)
        run.spawn(self._see_through(one))

    def _draw(self, round_: int, answered: set[str]) -> tuple[str, ...]:
        run, wanted = self._run, self._run.config.evaluation.clients
        if wanted and wanted <= len(answered):
            return ()
        pool = set(run.parts.fleet.workforce.evaluators(run.task, run.config.labels)) - answered
        return draw_evaluators(pool, wanted and wanted - len(answered), run.config.seed, round_)

    def _question(self, one: _UnderWay) -> pb.AttendResponse:
        run, (version, source) = self._run, self._run.behaviour.fingerprint
        message = EvaluationAssignment(
            key=ExchangeKey(run_id=run.id, round=one.round),
            task=run.config.task.name,
            fingerprint=TaskFingerprint(version=version, source=source),
            resources=[broadcast.resource for broadcast in one.broadcasts],
        )
        message.deadline.FromMilliseconds(max(0, round((one.ends - time.monotonic()) * 1000)))
        return pb.AttendResponse(evaluation=message)

    async def _see_through(self, one: _UnderWay) -> None:
        if one.outstanding:
            with suppress(TimeoutError):
                await asyncio.wait_for(one.over.wait(), one.ends - time.monotonic())
        del self._under_way[one.round]
        if one.outstanding:
            log.warning(
                "evaluation_incomplete", run=self._run.id, round=one.round, missing=len(one.outstanding),
                first=min(one.outstanding),
            )  # fmt: skip
        await self._conclude(one.round)
        self._run.log.under_way.discard(one.round)
        if self._run.ended:
            await prune(self._run)

    async def _conclude(self, round_: int) -> None:
        """Sum up what the ledger has: the very answers that operators are shown."""
        answers = await self._answers_at_last(round_)
        metrics = summary([(answer.num_examples, answer.metrics) for answer in answers])
        await settle(self._run, round_, metrics, "clients")

    async def make_up(self) -> None:
        """After a restart: rounds whose models are not sent out any more come to what their clients had said."""
        run, every = self._run, self._run.config.evaluation.clients_every
        for commit in list(run.log.commits.values()) if every else ():
            latest = commit is run.log.latest
            due = run.ended if latest else (commit.round + 1) % every == 0
            if due and EVALUATED not in commit.metrics and await self._answers_at_last(commit.round):
                await self._conclude(commit.round)

    async def keep(self) -> None:
        """Write down how long those under way still have, which a restart goes on with."""
        for one in list(self._under_way.values()):
            write, left = self._run.parts.ledger.store.set_clients_seconds_left, one.ends - time.monotonic()
            await keep(self._run, write, self._run.id, one.round, max(0.0, left))

    async def answers(self, round_: int) -> list[ClientEvaluation]:
        """What clients have said of a round, in the order of id bytes."""
        ledger = self._run.parts.ledger
        return await ledger.do(ledger.store.evaluations, self._run.id, round_)

    async def _answers_at_last(self, round_: int) -> list[ClientEvaluation]:
        """The same, once the ledger can be read."""
        return await until_room(self._run.no_room, lambda: self.answers(round_))

    def newest(self) -> int | None:
        """The newest round that clients were asked about; None before the first."""
        evaluated = [commit.round for commit in self._run.log.commits.values() if EVALUATED in commit.metrics]
        return max((*evaluated, *self._under_way), default=None)

    # What clients do.

    async def report(self, client: str, request: pb.ReportEvaluationRequest) -> None:
        """Keep a client's answer; its first one stands. One that comes too late is passed over: it did no wrong.

        Raises InvalidInput for values that are none, and for an evaluation that the client was not asked for.
        """
        _check(request)
        run, one = self._run, self._under_way.get(request.key.round)
        if one is None and self._was_due(request.key.round):
            log.debug("evaluation_late", run=run.id, round=request.key.round, client=client)
            return
        if one is None or client not in one.asked or request.key.exchange:
            came = f"round {request.key.round}, exchange {request.key.exchange} of {run.id} by {client}"
            raise InvalidInput("key", "an evaluation that this client was asked for", came)
        if client in one.answered:
            return
        answer = ClientEvaluation(
            run.id, one.round, client, request.num_examples, dict(request.metrics), reported_at=time.time()
        )
        await run.parts.ledger.insist(run.no_room, run.parts.ledger.store.record_evaluation, answer)
        one.answered.add(client)
        one.out(client)

    def _was_due(self, round_: int) -> bool:
        return bool(self._run.config.evaluation.clients_every) and round_ in self._run.log.commits

    def reattached(self, client: str) -> None:
        """A client is here again: tell it what it still has to evaluate."""
        for one in self._under_way.values():
            if client in one.outstanding:
                self._run.parts.fleet.push(client, self._question(one))

    def gone(self, client: str) -> None:
        """A client is lost, banned or forgotten."""
        for one in self._under_way.values():
            one.out(client)

    def failed(self, key: ExchangeKey, client: str) -> bool:
        """A client gave its evaluation of a round up. False: it was not waited for."""
        one = self._under_way.get(key.round)
        if one is None or key.exchange or client not in one.outstanding:
            return False
        one.out(client)
        return True


def _check(request: pb.ReportEvaluationRequest) -> None:
    if not 0 < request.num_examples < 2**63:
        raise InvalidInput("num_examples", "1 or more", request.num_examples)
    if not 0 < len(request.metrics) <= MAX_METRICS:
        raise InvalidInput("metrics", f"1 to {MAX_METRICS} metrics", f"{len(request.metrics)}")
    for name, value in request.metrics.items():
        if not (0 < len(name) <= MAX_NAME and name.isprintable()):
            raise InvalidInput("metrics", f"names of 1 to {MAX_NAME} printable characters", repr(name[:100]))
        if not (math.isfinite(value) and abs(value) <= MAX_VALUE):
            raise InvalidInput(f"metrics[{name!r}]", f"a finite value, at most {MAX_VALUE:g} in size", value)
