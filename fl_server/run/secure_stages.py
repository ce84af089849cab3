"""The stages of a run's rounds with secure aggregation: their messages, the clients' answers, and the sum at the end.

The protocol's state is made of the ledger at each stage, in the same way as after a restart: of the answers of exactly
those clients that ended each stage before. So a coordinator that is killed in any stage goes on in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

import numpy as np
import structlog

from fl_common.secure_aggregation.collector import Collector
from fl_common.secure_aggregation.errors import BadMessage, SecureAggregationError
from fl_common.secure_aggregation.rounding import Rounding
from fl_common.secure_aggregation.scalars import count_of, summed_of
from fl_common.secure_aggregation.signatures import Trust
from fl_common.secure_aggregation.terms import Place, Terms
from fl_server.aggregation.secure_aggregation import Total, settings_of
from fl_server.aggregation.updates import reads_of
from fl_server.errors import InvalidInput
from fl_server.rounds import effects
from fl_server.rounds import events as ev
from fl_server.rounds.events import Graph
from fl_server.rounds.sampling import by_id
from fl_server.rounds.secure import ANSWERS
from fl_server.rounds.state import Phase, RoundState
from fl_server.run.context import RunContext
from fl_server.run.control import RunControl
from fl_server.run.failures import Reason, whole_time
from fl_server.run.submissions import Submissions
from fl_server.store.errors import StoreError, StoreFull
from fl_server.store.records import AnswerRecord, HistoryRecord, StageRecord
from fl_server.store.spool.part_file import SpoolSource
from protos.fl.v1.training_pb2 import ExchangeKey, SecureStage, StageMessage

log = structlog.get_logger()

T = TypeVar("T")

MOST_NAMES = 5
"""Clients of a stage that the history names as dropped out."""
MOST_ANSWER_BYTES = 1 << 20
"""Bytes of a client's answer: enough for shares for thousands of neighbours."""
_STAGES: Mapping[Phase, SecureStage] = {
    Phase.AGREEING: SecureStage.SECURE_STAGE_KEYS,
    Phase.TOSSING: SecureStage.SECURE_STAGE_COINS,
    Phase.SHARING: SecureStage.SECURE_STAGE_SHARES,
    Phase.COLLECTING: SecureStage.SECURE_STAGE_MASKED,
    Phase.SIGNING: SecureStage.SECURE_STAGE_SURVIVORS,
    Phase.OPENING: SecureStage.SECURE_STAGE_OPENING,
}


@dataclass(frozen=True, slots=True)
class StoredRound:
    """What the ledger has of a draw of a round."""

    terms: Terms
    stages: Sequence[StageRecord]
    answers: Mapping[str, Mapping[str, bytes]]
    """Stage -> client -> answer."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage that is open: the protocol's state, and what each client is sent."""

    phase: Phase
    collector: Collector
    messages: Mapping[str, bytes]
    """Client -> content; "" for all others."""

    def message_for(self, client: str) -> bytes:
        """What a client is sent."""
        return self.messages.get(client, self.messages.get("", b""))


class SecureStages:
    """The stages of one run. Lives on the event loop; what changes them holds the run's turn."""

    def __init__(self, context: RunContext, control: RunControl, submissions: Submissions) -> None:
        self._context, self._control, self.submissions = context, control, submissions
        submissions.masked_bytes = lambda: self.masked_bytes
        self._terms: Terms | None = None
        self._stage: Stage | None = None

    @property
    def terms(self) -> bytes:
        """The terms of the draw under way; empty without one."""
        return b"" if self._terms is None else self._terms.to_bytes()

    @property
    def drawn(self) -> bool:
        """Whether the terms are those of the draw under way. They are not until its cohort is written."""
        state, terms = self._control.state, self._terms
        if not state.policy.secure:
            return True
        return terms is not None and (terms.place.round, terms.place.draw) == (state.round, state.attempt)

    @property
    def masked_bytes(self) -> int:
        """Bytes of a masked update."""
        return 0 if self._terms is None else self._terms.size_bytes

    @property
    def trust(self) -> Trust:
        """Whose certificates the coordinator takes."""
        return trust_of(self._context)

    def begin(self, cohort: Sequence[str]) -> None:
        """A cohort was drawn, and is written: its keys come next."""
        self._terms = terms_of(self._context, self._control, self._control.state, cohort)
        self._stage = Stage(Phase.AGREEING, Collector(self._terms, self.trust), {})

    async def open(self, effect: effects.OpenStage) -> None:
        """Write a stage, and make its messages. A fault in what clients sent is the round's end."""
        context, control = self._context, self._control
        place = (context.run_id, effect.round, effect.exchange, effect.attempt)
        record = StageRecord(*place, effect.stage, effect.members, effect.closed, time.time())
        why = HistoryRecord(record.opened_at, "coordinator", "stage_opened", context.run_id, self._told(effect))
        await control.write(context.store.open_stage, record, whole_time(control), why)
        context.cohort_log.info(
            "stage_opened", run=context.run_id, round=effect.round, attempt=effect.attempt, stage=effect.stage,
            clients=len(effect.members), answered=len(effect.closed),
        )  # fmt: skip
        await self._make()

    def _told(self, effect: effects.OpenStage) -> str:
        """The row of history of a stage: who has answered the stage before and who dropped out; shares for a secret."""
        where, before = f"round {effect.round}, attempt {effect.attempt}: {effect.stage}", self._stage
        if before is None or self._context.hides_cohorts:
            return where
        of = before.collector
        asked = of.survivors or of.sharers or of.members or of.terms.cohort
        gone = [client for client in asked if client not in effect.closed]
        # Enough signatures end their stage: the other survivors have not dropped out.
        told = gone[:MOST_NAMES] if before.phase is not Phase.SIGNING else []
        without = f", and not {', '.join(told)}{' and others' if told != gone else ''}" if told else ""
        shares = "" if (graph := graph_of(of)) is None else f"; {graph.threshold} shares open a secret"
        return (
            f"{where}; {len(effect.closed)} of {len(asked)} clients sent their {ANSWERS[before.phase]}{without}{shares}"
        )

    async def restore(self) -> Graph | None:
        """Make the stage under way of the ledger again. Returns the graph of its shares, once its keys are closed."""
        state, context = self._control.state, self._context
        attempts = await context.services.ledger.do(context.store.attempts, context.run_id, state.round)
        if not attempts or not attempts[-1].cohort:
            return None
        self.begin(attempts[-1].cohort)
        await self._make(restoring=True)
        return None if self._stage is None else graph_of(self._stage.collector)

    async def _make(self, *, restoring: bool = False) -> None:
        """Make the state of the stage under way of what the ledger has."""
        control = self._control
        try:
            self._stage = await self._from_ledger(stage_of)
        except SecureAggregationError as error:
            warn = self._context.cohort_log.warning
            warn("stage_not_closed", run=self._context.run_id, round=control.state.round, error=str(error))
            self._stage = None
            control.post(ev.RoundSpoiled(str(error)))
            return
        self._context.rounds.statistics.secure.update(counted(self._stage.collector))
        if not restoring and control.state.phase is Phase.SHARING and (graph := graph_of(self._stage.collector)):
            control.post(ev.GraphMade(graph))

    async def _from_ledger(self, make: Callable[[StoredRound, Trust], T]) -> T:
        """Something that is made of what the ledger has of the draw under way, outside the event loop."""
        context, state, terms = self._context, self._control.state, self._terms
        if terms is None:
            raise RuntimeError("expected a draw with secure aggregation")
        stages = await self._control.read(context.store.stages, context.run_id, state.round)
        answers = await self._control.read(context.store.answers, context.run_id, state.round, state.attempt)
        return await context.services.in_compute(make, StoredRound(terms, stages, answers), self.trust)

    def message_for(self, client: str) -> StageMessage | None:
        """The message of the stage under way for a client; None where the assignment is all.

        None, too, while the stage is being opened: the one in memory is that before. All its members are sent it then.
        """
        state, stage = self._control.state, self._stage
        if stage is None or stage.phase is not state.phase or not (content := stage.message_for(client)):
            return None
        return StageMessage(key=self._key, draw=state.attempt, stage=_STAGES[state.phase], content=content)

    @property
    def _key(self) -> ExchangeKey:
        state = self._control.state
        return ExchangeKey(run_id=self._context.run_id, round=state.round, exchange=state.exchange)

    async def answer(self, client: str, answer: StageMessage) -> bool:
        """Take a client's answer. Returns whether it was wanted. Raises InvalidInput, and StoreFull."""
        if len(answer.content) > MOST_ANSWER_BYTES:
            raise InvalidInput("answer.content", f"at most {MOST_ANSWER_BYTES} bytes", len(answer.content))
        if self._control.run_status.write_failure:
            raise StoreFull(self._control.run_status.write_failure)
        return await self._control.in_turn(self._take(client, answer))

    async def _take(self, client: str, answer: StageMessage) -> bool:
        context, control, stage = self._context, self._control, self._stage
        state = control.state
        open_ = state.staged and stage is not None and client in state.drawn
        if not open_ or (answer.key, answer.draw, answer.stage) != (self._key, state.attempt, _STAGES[state.phase]):
            return False
        if stage is None:
            return False
        try:
            added(stage.collector, state.phase, client, answer.content)
        except BadMessage as error:
            await self._refuse(client, str(error))
            raise InvalidInput("answer.content", "an answer that the protocol allows", str(error)) from error
        place = (context.run_id, state.round, state.exchange, state.attempt)
        record = AnswerRecord(*place, state.phase.value, client, answer.content)
        try:
            stands = await context.services.ledger.do(context.store.add_answer, record)
        except StoreError:
            await self._make()  # without the answer, which is in memory now
            raise
        if stands != answer.content:
            raise InvalidInput("answer.content", "the client's first answer to this stage again", "another one")
        event = ev.StageAnswered(client)
        if control.applies(event):
            await control.take(event)
        return True

    async def _refuse(self, client: str, why: str) -> None:
        """A client's answer is not one of the protocol: it takes no further part in the round."""
        context, control = self._context, self._control
        if not context.hides_cohorts:
            log.warning("answer_refused", run=context.run_id, round=control.state.round, client=client, why=why)
        if control.state.works(client):
            await self.submissions.take_failure(client, Reason(f"secure aggregation: {why}"))

    async def total(self, sources: Sequence[SpoolSource]) -> Total:
        """The sum of these masked updates, without their masks. Raises SecureAggregationError."""
        return await self._from_ledger(lambda stored, trust: total_of(stored, trust, sources))


def trust_of(context: RunContext) -> Trust:
    """Whose certificates the coordinator takes. Raises InvalidInput without an authority of clients."""
    tls, issuer = context.services.config.tls, context.services.issuer
    if tls is None or tls.client_ca is None:
        raise InvalidInput(
            "secure_aggregation",
            "a coordinator with tls.client_ca: clients sign their keys with their certificates",
            "none",
        )
    return Trust.of_authorities(tls.client_ca.read_bytes(), "outside" if issuer is None else "coordinator")


def terms_of(context: RunContext, control: RunControl, state: RoundState, cohort: Sequence[str]) -> Terms:
    """The terms of a draw."""
    section, means = control.config.secure_aggregation, context.model.engine.secure_means
    rounding = means.rounding(state.round, state.attempt, state.exchange)
    if section is None:
        raise RuntimeError("expected a run with the section secure_aggregation")
    place = Place(context.run_id, state.round, state.attempt, state.exchange)
    return Terms(
        place, 0, by_id(cohort), means.values, means.value_bits(len(cohort)), count_of(rounding.metrics),
        settings_of(section), rounding.to_text(),
    )  # fmt: skip


def added(collector: Collector, phase: Phase, client: str, content: bytes) -> None:
    """Add an answer to the protocol's state. Raises BadMessage."""
    match phase:
        case Phase.AGREEING:
            collector.add_keys(client, content, datetime.now(UTC))
        case Phase.TOSSING:
            collector.add_coin(client, content)
        case Phase.SHARING:
            collector.add_shares(client, content)
        case Phase.SIGNING:
            collector.add_signature(client, content)
        case _:
            collector.add_opening(client, content)


def stage_of(stored: StoredRound, trust: Trust) -> Stage:
    """The last stage that was opened: each one before has the answers of those clients that ended it.

    Raises SecureAggregationError if these answers cannot be used.
    """
    collector = Collector(stored.terms, trust)
    before, messages = Phase.AGREEING, dict[str, bytes]()
    for record in stored.stages:
        for client in record.closed if before is not Phase.COLLECTING else ():
            added(collector, before, client, stored.answers[before.value][client])
        match before:
            case Phase.AGREEING:
                messages = {"": collector.close_keys()}
            case Phase.TOSSING:
                messages = {"": collector.close_coins()}
            case Phase.SHARING:
                messages = dict(collector.close_shares())
            case Phase.COLLECTING:
                messages = {"": collector.close_masked(record.closed)}
            case _:
                messages = {"": collector.close_signatures()}
        before = Phase(record.stage)
    for client, content in stored.answers.get(before.value, {}).items():
        added(collector, before, client, content)
    return Stage(before, collector, messages)


def graph_of(collector: Collector) -> Graph | None:
    """The graph of a round's shares, as the core needs it; None before the keys and coins are here."""
    if not collector.members or collector.needs_coins:
        return None
    group, plan = collector.group, collector.group.plan
    names = group.clients
    holders = {name: frozenset(names[at] for at in group.holders(number)) for number, name in enumerate(names)}
    return Graph(holders, plan.threshold, plan.quorum, plan.fewest)


def counted(collector: Collector) -> dict[str, int]:
    """The clients of a draw by the stage that they completed, and the shares for a secret; what is not known is out."""
    graph, survivors = graph_of(collector), len(collector.survivors)
    numbers = {
        "members": len(collector.members),
        "sharers": len(collector.sharers),
        "survivors": survivors,
        "signers": len(collector.signers),
        "threshold": 0 if graph is None else graph.threshold,
    }
    known = {name: number for name, number in numbers.items() if number}
    return known | ({"dropped": len(collector.terms.cohort) - survivors} if survivors else {})


def total_of(stored: StoredRound, trust: Trust, sources: Sequence[SpoolSource]) -> Total:
    """The sum of masked updates without their masks; blocking. Memory: one number of 8 bytes for each value."""
    with ExitStack() as opened:
        readers = [opened.enter_context(reads_of(source)) for source in sources]
        unmasked = stage_of(stored, trust).collector.unmasked(readers)
        numbers = np.empty(stored.terms.values, np.int64)
        at = 0
        for chunk in unmasked.values():
            numbers[at : at + len(chunk)] = chunk
            at += len(chunk)
        metrics = Rounding.from_text(stored.terms.quantizer).metrics
        return Total(numbers, summed_of(unmasked.scalars(), metrics))
