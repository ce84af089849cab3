"""The results of a simulation's rounds: what a round counted, measured and took, and who did not deliver."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

from fl_ops.simulate.federation import Federation
from fl_ops.simulate.reports import Failure, RoundResult
from fl_ops.simulate.system.clock import Clock
from fl_ops.simulate.updates import Contribution, NotDelivered
from fl_server.admission.client_rules import mean_epochs
from fl_server.rounds import effects
from fl_server.rounds import events as ev
from fl_server.rounds.metrics import as_received
from fl_server.rounds.state import RoundState
from fl_server.run.round_statistics import ClientTransfers, why_short


class RoundReport:
    """Makes the result of a round once it is committed and evaluated."""

    def __init__(self, federation: Federation, undelivered: Undelivered, clock: Clock | None) -> None:
        self._federation, self._undelivered, self._clock = federation, undelivered, clock
        self._counted: Sequence[Contribution] = ()
        self._closed: RoundState | None = None
        self._began = time.monotonic()
        self._began_at = 0.0

    def begin(self) -> None:
        """The work of a round begins."""
        self._began = time.monotonic()
        self._began_at = 0.0 if self._clock is None else self._clock.now

    def committed(self, closed: RoundState, counted: Sequence[Contribution]) -> None:
        """A round was committed. closed: the state before the commit."""
        self._closed, self._counted = closed, counted

    def result(self, metrics: Mapping[str, float], *, digests: bool) -> RoundResult:
        """The result of the round that was committed; once for each. digests: whether the model's is taken."""
        closed, counted, federation, clock = self._closed, self._counted, self._federation, self._clock
        if closed is None:
            raise RuntimeError("result() was called without a commit")
        # The updates may be in a device's memory, which the next round needs.
        self._closed, self._counted = None, ()
        # What a coordinator keeps: of clients that are private, no mean without noise.
        told = counted if federation.config.client_privacy is None else ()
        losses = [one.training_loss for one in told if one.training_loss is not None]
        loss, epochs = sum(losses) / len(losses) if losses else None, told
        if federation.config.secure_aggregation is not None:
            summed, epochs = federation.summed, ()
            loss, metrics = summed.training_loss, {**as_received(summed.evaluated, summed.metrics), **metrics}
        down, up = federation.traffic.take()
        result = RoundResult(
            round=federation.snapshot.round,
            accepted=tuple(one.info.client_id for one in counted),
            dropped=self._undelivered.count if closed.versions else len(closed.drawn) - len(closed.accepted),
            attempts=closed.attempt + 1,
            training_loss=loss,
            metrics=metrics,
            bytes_down=down,
            bytes_up=up,
            seconds=time.monotonic() - self._began,
            digest=federation.digest if digests else None,
            local_epochs=mean_epochs((one.info.num_examples, one.epochs) for one in epochs),
            simulated_s=None if clock is None else clock.now - self._began_at,
            simulated_total_s=None if clock is None else clock.now,
            why_short=self._undelivered.why_short(closed),
            versions=closed.versions,
        )
        self._undelivered.forget()
        return result


FAILURES_KEPT = 100
"""Number of client failures that a simulation remembers."""


class Undelivered:
    """What became of the clients that were drawn and do not count, in the words of a coordinator."""

    def __init__(self, notify: Callable[[Failure], None]) -> None:
        """notify: called after each failure of a client."""
        self.latest: list[str] = []
        """Why clients delivered no update, the latest last; at most FAILURES_KEPT."""
        self._notify, self._transfers = notify, ClientTransfers()

    @property
    def count(self) -> int:
        """Clients that delivered nothing since the last round."""
        return len(self._transfers.outs)

    def begin(self, attempt: effects.OpenAttempt) -> None:
        """An attempt begins."""
        self._transfers.begin(attempt.round, attempt.exchange)

    def forget(self) -> None:
        """The round is over, or begins again."""
        self._transfers.clear()

    def failed(self, state: RoundState, result: NotDelivered) -> ev.Event:
        """The work of a client failed, or its update was refused. Returns the event."""
        client, why = result.client, result.why
        self._add(Failure(state.round, client, why, result.trace), "refused" if result.refused else "failed")
        if result.refused:
            return ev.UpdateRefused(client, result.fault, why)
        # On the same data, with the same seed, the same work fails again.
        return ev.WorkFailed(client, why, result.cause, result.not_finite, repeats=True)

    def dropped(self, command: effects.DropCulprits) -> None:
        """Accepted updates spoiled the round."""
        for client, why in command.culprits:
            self._add(Failure(command.round, client, why), "refused")

    def gone(self, client: str) -> None:
        """A client's device went away."""
        self._transfers.outs[client] = "lost", "its device went away"

    def late(self, clients: Collection[str], state: RoundState) -> None:
        """These clients missed a deadline; some of them may go on in a further attempt."""
        cancelled = (client for client in clients if not state.works(client))
        self._transfers.outs.update(dict.fromkeys(cancelled, ("cancelled", "the deadline passed")))

    def why_short(self, closed: RoundState) -> str:
        """Why a round has fewer updates than it wants; empty if it has all."""
        return why_short(closed, self._transfers.outs, "")

    def _add(self, failure: Failure, kind: str) -> None:
        why = f"update refused: {failure.why}" if kind == "refused" else failure.why
        self._transfers.outs[failure.client] = kind, why
        self.latest = [*self.latest, str(failure)][-FAILURES_KEPT:]
        self._notify(failure)
