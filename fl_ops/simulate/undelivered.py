"""Clients of a simulation that delivered no update: the latest ones of the run, and why a round is short of updates."""

from __future__ import annotations

from collections.abc import Callable, Collection

from fl_ops.simulate.reports import Failure
from fl_ops.simulate.updates import NotDelivered
from fl_server.rounds import effects
from fl_server.rounds import events as ev
from fl_server.rounds.state import RoundState
from fl_server.run.round_statistics import ClientTransfers, why_short

FAILURES_KEPT = 100
"""Number of client failures that a simulation remembers."""


class Undelivered:
    """What became of the clients that were drawn and do not count, in the words of a coordinator."""

    def __init__(self, notify: Callable[[Failure], None]) -> None:
        """notify: called after each failure of a client."""
        self.latest: list[str] = []
        """Why clients delivered no update, the latest last; at most FAILURES_KEPT."""
        self._notify, self._transfers = notify, ClientTransfers()

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
