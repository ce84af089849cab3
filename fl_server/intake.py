"""What updates and failures ask of a run: is this one wanted, what must it be, and who will not deliver any more.

Uploads and the fleet come here. A word on an update is written down and acted on in one turn of the run's loop, so
that the round cannot change in between.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import structlog

from fl_server import events as ev
from fl_server.admission import Gate
from fl_server.progress import Progress
from fl_server.runs.gates import Collecting, gate_of
from fl_server.runs.ordered import registered_examples
from fl_server.store.base import StoreFull, UpdateRecord
from protos.fl.v1.training_pb2 import ExchangeKey, RefusalReason, UpdateHeader

if TYPE_CHECKING:
    from fl_server.run import Run

log = structlog.get_logger()


class Intake:
    """A run's judgement on what clients send. Lives on the event loop."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.refused: set[str] = set()
        """Clients whose update of this round was refused: the refusal stands, so they are not drawn for it again."""
        self.not_finite: set[str] = set()
        """Clients that came to a NaN or an infinity in this round, or whose update made a sum overflow by itself."""
        self.too_long: set[str] = set()
        """Clients whose update of this round was refused for its length."""
        self.gave_up: Counter[str] = Counter()
        """Times that clients failed in this round, since the coordinator's start."""

    def refusal(self, key: ExchangeKey, client: str) -> RefusalReason | None:
        """Why an update of the client for the key would not be taken; None if it would."""
        state = self._run.state
        if not state.collects or (key.round, key.exchange) != (state.round, state.exchange):
            return RefusalReason.REFUSAL_REASON_LATE
        if self._run.parts.fleet.banned(client):
            return RefusalReason.REFUSAL_REASON_BANNED
        return None if client in state.drawn else RefusalReason.REFUSAL_REASON_NOT_ASSIGNED

    def refusal_of(self, header: UpdateHeader, client: str) -> RefusalReason | None:
        """`refusal` for an update that came; what was made before the round was drawn anew comes too late."""
        before = header.state_epoch < self._run.record.state_epoch
        if before or (header.key.exchange and header.attempt < self._run.state.first_attempt):
            return RefusalReason.REFUSAL_REASON_LATE
        return self.refusal(header.key, client)

    def unheard(self, key: ExchangeKey, client: str) -> bool:
        """Whether nothing was said on an update of the exchange under way: then the ledger need not be asked.

        Of a word that is just being written down nothing is known here yet; `enter` finds it.
        """
        state = self._run.state
        if not state.collects or (key.round, key.exchange) != (state.round, state.exchange):
            return False
        return client not in self.refused and all(client != other for other, _ in state.admitted)

    def gate(self, client: str) -> Gate:
        """What a client's update of the round under way must be."""
        run = self._run
        registered = registered_examples(run.parts.fleet.known(client), run.task)
        return gate_of(
            run.model.engine,
            Collecting(run.model.snapshot, run.state.exchange, run.record.state_epoch, run.norms),
            registered,
            run.parts.config.limits.max_update_mib << 20,
        )

    async def enter(self, update: UpdateRecord, header: UpdateHeader) -> UpdateRecord | None:
        """Write the first word on an update down and act on it, with nothing in between; None if it came too late.

        The round may be drawn anew at any other moment, and what was made for it before then does not count. Raises
        StoreFull where the run itself waits for room: the client had better come again than wait with it.
        """
        run = self._run
        if run.cannot_write:
            raise StoreFull(run.cannot_write)
        async with run.turn:
            if self.refusal_of(header, update.client_id) is not None:
                return None
            standing, why = run.parts.fleet.quarantine.weigh(update)
            stands = await run.parts.ledger.do(run.parts.ledger.store.record_update, update, standing, why)
            if standing is not None and stands == update:
                run.parts.fleet.keep_standing(standing, why)
            event = ev.UpdateAdmitted(stands.client_id, stands.digest)
            if stands.admitted and stands.digest == update.digest and run.applies(event):
                run.tally.assignment("admitted")
                await run.take(event)
        if not stands.admitted:
            self.client_out(stands.client_id, "refused", f"update refused: {stands.detail}")
        return stands

    def client_out(self, client: str, state: str, why: str) -> None:
        """A client will not deliver. state, for the metric: "refused", "failed" or "lost"."""
        run = self._run
        if state == "refused":
            self.refused.add(client)
            run.look_again()
        if client in run.state.outstanding:
            self._tell_out(client, state, why)
            run.post(ev.ClientOut(client))

    async def client_failed(self, key: ExchangeKey, client: str, why: str, *, finite: bool) -> bool:
        """A client says that it cannot do its work. False: it has none of that name that is wanted.

        finite: it did not come to a NaN or an infinity. Taken at once, so that a repeat finds nothing to give up.
        """
        async with self._run.turn:
            if self.refusal(key, client) is not None or client not in self._run.state.outstanding:
                return False
            if not finite:
                self.not_finite_from(client)
            await self.failed_now(client, why)
            return True

    async def failed_now(self, client: str, why: str) -> None:
        """An outstanding client will not deliver; the caller has the run's turn."""
        event = ev.ClientOut(client)
        if self._run.applies(event):
            self.gave_up[client] += 1
            self._tell_out(client, "failed", why)
            await self._run.take(event)

    def _tell_out(self, client: str, state: str, why: str) -> None:
        run = self._run
        run.tally.assignment(state)
        log.info("client_out", run=run.id, round=run.state.round, client=client, state=state, why=why)
        run.watchers.tell(Progress("client_out", f"{client}: {why}"))

    def not_finite_from(self, client: str) -> None:
        """A client came to a NaN or an infinity. Where as many did as are wanted, and none to better, the run ends."""
        self.not_finite.add(client)
        if len(self.not_finite) >= max(2, self._run.state.goal) and not self._run.state.admitted:
            self.fail_as_diverged()

    def fail_as_diverged(self) -> None:
        """Training leads nowhere; the last committed model stays."""
        round_ = self._run.state.round
        self._run.fail(
            f"{len(self.not_finite)} clients came to values that are not finite in round {round_}, and none "
            f"to others; the model of round {round_ - 1} stays. Lower the learning rate; `{self._run.remedy}` goes on "
            "from there"
        )

    def all_too_long(self) -> bool:
        """Whether no update of the round is left and several clients were refused for length: then it is no culprit."""
        state, late = self._run.state, self.too_long | self.not_finite
        return len(self.too_long) >= max(2, state.goal) and state.drawn <= late and not state.admitted

    def fail_as_too_long(self) -> None:
        """Norms have grown as those of one bad client would: training diverges, or the limit is too tight."""
        round_ = self._run.state.round
        self._run.fail(
            f"the updates of all {len(self.too_long)} clients of round {round_} were longer than the run allows; the "
            f"model of round {round_ - 1} stays. Lower the learning rate; `{self._run.remedy}` goes on from there. "
            "Where such norms are right, make a run with another round.max_relative_norm or max_relative_payload"
        )

    def forget_failures(self) -> None:
        """The round is over, or drawn anew: everybody may be drawn again."""
        if self.refused:
            self._run.look_again()
        self.refused.clear()
        self.not_finite.clear()
        self.too_long.clear()
        self.gave_up.clear()
