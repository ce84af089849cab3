"""This device in a round with secure aggregation: keys before the training, then an answer to each stage.

Stages are answered as their messages come, beside the training. Only the masked update waits for the training and for
the shares of the others. What is answered is on disk before it leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import NamedTuple, TypeVar

import numpy as np
import structlog

from fl_client.connection.link import Link
from fl_client.errors import TransportError, WorkFailed, unsupported
from fl_client.gates.state_directory import StateDirectory
from fl_client.policy.site import SitePolicy
from fl_client.secure_aggregation.members import Members
from fl_client.storage.pending_updates import Key, Update, key_of, update_digest
from fl_common.certificates.pem import Pem
from fl_common.secure_aggregation.errors import Refused
from fl_common.secure_aggregation.member import Member
from fl_common.secure_aggregation.rounding import Rounding
from fl_common.secure_aggregation.scalars import Measured, scalars_of
from fl_common.secure_aggregation.signatures import Signer, Trust
from fl_common.secure_aggregation.terms import SiteFloors, Terms
from fl_common.waiting import shielded
from protos.codec import digest_message, digest_of
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import training_pb2
from protos.fl.v1.training_pb2 import SecureStage, StageMessage

log = structlog.get_logger()

T = TypeVar("T")

PROTOCOL = "secagg+"
MOST_WAITING = 16
"""Draws whose messages wait for their assignment."""
TOLD = 1
"""Examples and steps in the header of a masked update, in place of the client's: their sums are masked."""


_NOTHING = Measured()


class _Draw(NamedTuple):
    key: Key
    draw: int


class Participant:
    """This device in the secure aggregations of its runs. Lives on the event loop."""

    def __init__(  # noqa: PLR0913, PLR0917 - what the device gives it
        self, make: Callable[[], Members], certified: Callable[[], Pem | None], state: StateDirectory,
        site: SitePolicy, link: Link,
    ) -> None:  # fmt: skip
        """make: makes the store of members, at the first use. certified: None on a device without certificates."""
        self._make, self._certified, self._state = make, certified, state
        self._site, self._link = site, link
        self._members: Members | None = None
        self._waiting: dict[_Draw, dict[SecureStage, StageMessage]] = {}
        """Messages whose draw has not begun here."""
        self._begun: dict[str, _Draw] = {}
        """The draw that each run is in here."""
        self._deliveries: dict[_Draw, asyncio.Future[bytes]] = {}
        self._told: set[tuple[str, str]] = set()
        self._turn = asyncio.Lock()

    # The assignment.

    async def begin(self, assignment: training_pb2.Assignment) -> None:
        """Answer an assignment with keys. Raises WorkFailed if this device does not take part."""
        given = assignment.secure_aggregation
        if given.protocol != PROTOCOL:
            raise _unsupported(f"expected the protocol {PROTOCOL}, got {given.protocol[:40]!r}")
        terms = _terms_of(given.terms)
        place, run = terms.place, assignment.key.run_id
        if (place.run, place.round, place.exchange) != key_of(assignment.key):
            raise _unsupported("expected terms of the assignment's own round")
        signer, trust = self._signer(), self.trust()
        self._tell(run, trust)
        work, floors = update_digest(assignment), self._floors()
        keys = await self._change(run, lambda member: member.begin(terms, work, signer, floors))
        draw = _Draw(key_of(assignment.key), place.draw)
        self._begun[run] = draw
        self._deliveries.setdefault(draw, asyncio.get_running_loop().create_future())
        for other in [other for other in self._deliveries if other.key[0] == run and other != draw]:
            self._deliveries.pop(other).cancel()
        await self._send(
            StageMessage(key=assignment.key, draw=draw.draw, stage=SecureStage.SECURE_STAGE_KEYS, content=keys)
        )
        for other in [other for other in self._waiting if other.key[0] == run and other < draw]:
            del self._waiting[other]
        for message in self._waiting.pop(draw, {}).values():
            await self.answer(message)

    def _floors(self) -> SiteFloors:
        policy = self._site.policy
        rules = policy.secure_aggregation
        return SiteFloors(max(rules.min_clients, policy.work.min_clients), rules.max_corrupt)

    def _signer(self) -> Signer:
        certified = self._certified()
        if certified is None:
            raise _unsupported("expected a certificate of this device ([tls] of its settings), which signs its keys")
        try:
            return Signer.from_pem(certified.cert, certified.key)
        except ValueError as error:
            raise _unsupported(str(error)) from None

    def trust(self) -> Trust:
        """Whose keys this device takes for those of other clients."""
        certified = self._certified()
        return self._site.trust_of_clients(None if certified is None else certified.ca)

    def _tell(self, run: str, trust: Trust) -> None:
        """Say once for each run which protection holds."""
        if (run, trust.holder) not in self._told:
            self._told.add((run, trust.holder))
            write = log.info if trust.protects else log.warning
            write("secure_aggregation", run=run, authority=trust.holder, protection=trust.statement)

    async def masked(
        self, assignment: training_pb2.Assignment, rounded: Update, measured: Measured = _NOTHING
    ) -> Update:
        """The masked update of rounded numbers, once the shares of the others are here. It may leave now.

        rounded: the header of the update, and its numbers as int32. measured: of the received model. Raises WorkFailed.
        """
        draw = self._begun[assignment.key.run_id]
        delivery = await shielded(self._deliveries[draw])
        terms = _terms_of(assignment.secure_aggregation.terms)
        parts = [np.frombuffer(piece, np.int32) for piece in rounded.pieces]
        values = parts[0] if len(parts) == 1 else np.concatenate(parts)
        header = training_pb2.UpdateHeader()
        header.CopyFrom(rounded.header)
        rounding = Rounding.from_text(terms.quantizer)
        if header.HasField("training_loss") and rounding.loss:
            measured = replace(measured, loss=header.training_loss)
        scalars = scalars_of(rounding.counted(header.num_examples), measured, rounding.metrics)
        pieces = await self._change(assignment.key.run_id, lambda member: tuple(member.mask(delivery, values, scalars)))
        header.ClearField("training_loss")
        header.num_examples = header.num_steps = TOLD
        header.digest.CopyFrom(digest_message(digest_of(*pieces)))
        return Update(rounded.work_digest, header, pieces)

    # The stages.

    async def answer(self, message: StageMessage) -> None:
        """Answer the message of a stage. One whose draw has not begun here waits for its assignment.

        Raises WorkFailed if this device does not go on, TransportError if the coordinator refuses the answer.
        """
        draw, run = _Draw(key_of(message.key), message.draw), message.key.run_id
        if self._begun.get(run) != draw:
            if draw > self._begun.get(run, _Draw((run, -1, 0), 0)):
                self._waiting = {
                    other: kept for other, kept in self._waiting.items() if other.key[0] != run or other == draw
                }
                self._waiting.setdefault(draw, {})[message.stage] = message
                while len(self._waiting) > MOST_WAITING:  # a device works for few runs, and a coordinator may name many
                    del self._waiting[next(iter(self._waiting))]
            return
        if message.stage == SecureStage.SECURE_STAGE_MASKED:
            if not (delivery := self._deliveries[draw]).done():
                delivery.set_result(message.content)
            return
        signer, trust = self._signer(), self.trust()
        content = await self._change(run, lambda member: _answer(member, message, signer, trust))
        if content:
            await self._send(StageMessage(key=message.key, draw=message.draw, stage=message.stage, content=content))

    def forget(self, key: Key) -> None:
        """The work for a key is over."""
        for draw in [draw for draw in self._deliveries if draw.key == key]:
            self._deliveries.pop(draw).cancel()
        self._waiting = {draw: kept for draw, kept in self._waiting.items() if draw.key != key}

    async def _change(self, run: str, action: Callable[[Member], T]) -> T:
        """Do something with the run's member, whose state is then on disk. Raises WorkFailed."""

        def change() -> T:
            if self._members is None:
                self._members = self._make()
            return self._members.change(run, action)

        async with self._turn:
            try:
                return await self._state.required(change)
            except Refused as refused:
                log.warning("secure_aggregation_refused", run=run, reason=refused.reason, why=str(refused))
                raise WorkFailed(pb.FAILURE_REASON_SECURE_AGGREGATION, f"{refused.reason}: {refused}") from refused
            except ValueError as error:
                raise _unsupported(str(error)) from error

    async def _send(self, answer: StageMessage) -> None:
        answered = await self._link.ask(pb.AnswerStageRequest(answer=answer), pb.AnswerStageResponse)
        key, wanted = answer.key, answered.wanted
        log.debug("stage_answered", run=key.run_id, round=key.round, stage=answer.stage, wanted=wanted)


def _answer(member: Member, message: StageMessage, signer: Signer, trust: Trust) -> bytes:
    """The answer to a stage's message; empty for a stage that this version does not know."""
    now = datetime.now(UTC)
    match message.stage:
        case SecureStage.SECURE_STAGE_COINS:
            return member.answer_key_list(message.content, trust, now)
        case SecureStage.SECURE_STAGE_SHARES:
            if member.tosses_coins:
                return member.answer_coins(message.content)
            return member.answer_key_list(message.content, trust, now)
        case SecureStage.SECURE_STAGE_SURVIVORS:
            return member.answer_survivors(message.content, signer)
        case SecureStage.SECURE_STAGE_OPENING:
            return member.answer_signatures(message.content)
        case _:
            return b""


def _terms_of(raw: bytes) -> Terms:
    try:
        return Terms.from_bytes(raw)
    except ValueError as error:
        raise _unsupported(str(error)) from None


def _unsupported(why: str) -> WorkFailed:
    return unsupported(f"secure aggregation: {why}")


def failed_stage(error: WorkFailed | TransportError) -> WorkFailed:
    """The failure to report for a stage that could not be answered."""
    if isinstance(error, WorkFailed):
        return error
    return WorkFailed(pb.FAILURE_REASON_REFUSED, f"the coordinator: {error}")
