"""The results of a simulation's rounds: what a round counted, measured, transferred and took."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from fl_ops.simulate.federation import Federation
from fl_ops.simulate.reports import RoundResult
from fl_ops.simulate.system.simulated_time import SimulatedTime
from fl_ops.simulate.undelivered import Undelivered
from fl_ops.simulate.updates import Contribution
from fl_server.admission.client_rules import mean_epochs
from fl_server.rounds.state import RoundState


class RoundReport:
    """Makes the result of a round once it is committed and evaluated."""

    def __init__(self, federation: Federation, undelivered: Undelivered, clock: SimulatedTime | None) -> None:
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
        losses = [one.training_loss for one in counted if one.training_loss is not None]
        down, up = federation.traffic.take()
        result = RoundResult(
            round=federation.snapshot.round,
            accepted=tuple(one.info.client_id for one in counted),
            dropped=len(closed.drawn) - len(closed.accepted),
            attempts=closed.attempt + 1,
            training_loss=sum(losses) / len(losses) if losses else None,
            metrics=metrics,
            bytes_down=down,
            bytes_up=up,
            seconds=time.monotonic() - self._began,
            digest=federation.digest if digests else None,
            local_epochs=mean_epochs((one.info.num_examples, one.epochs) for one in counted),
            simulated_s=None if clock is None else clock.now - self._began_at,
            simulated_total_s=None if clock is None else clock.now,
            why_short=self._undelivered.why_short(closed),
        )
        self._undelivered.forget()
        return result
