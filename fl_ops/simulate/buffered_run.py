"""The clients of a simulated run with a buffer: who begins, and who arrives next."""

from __future__ import annotations

from collections.abc import Iterable

from fl_ops.simulate.buffered_updates import BufferedUpdates
from fl_ops.simulate.federation import Federation
from fl_ops.simulate.system.simulated_time import SimulatedTime
from fl_server.rounds import effects
from fl_server.rounds import events as ev
from fl_server.rounds.sampling import ticket
from fl_server.rounds.state import RoundState
from fl_server.run.assignments import RoundPosition


class BufferedRun:
    """Decides what happens next, by the devices' times; without them, each client that works is as likely."""

    def __init__(self, federation: Federation, time: SimulatedTime | None) -> None:
        self.updates = BufferedUpdates(federation, federation.folder / "buffer")
        self._federation, self._time = federation, time

    def carry_out(self, command: effects.Effect) -> None:
        """Begin or end the work that a command is about."""
        match command:
            case effects.OpenAttempt():
                self._open(command)
            case effects.Cancel():
                self._cancel(command.clients)
            case effects.DropCulprits():
                self.updates.leave_out([client for client, _ in command.culprits], command.versions)
            case effects.RestartRound():
                self.updates.forget(self._federation.snapshot.round + 1)

    def _open(self, attempt: effects.OpenAttempt) -> None:
        """The clients of a draw begin from the latest model. Those that will not finish do not train."""
        cohort = attempt.cohort
        if self._time is not None:
            self._cancel(cohort)  # an earlier work whose deadline has passed
            self._time.open(attempt)
            cohort = tuple(client for client in cohort if self._time.clock.delivers(client))
        deadline = self._federation.config.round.deadline_s
        self.updates.begin(RoundPosition(attempt.round, 0, attempt.attempt, deadline), cohort)

    def _cancel(self, clients: Iterable[str]) -> None:
        """These clients stop their work."""
        self.updates.drop(clients)
        if self._time is not None:
            self._time.cancel(clients)

    def go_on(self, state: RoundState) -> str | ev.Event | None:
        """The client that arrives next with an update that is wanted, or another event. None: nobody works."""
        if self._time is None:
            return min(state.outstanding, key=lambda client: self._arrival(state, client), default=None)
        while (happens := self._time.go_on()) is not None:
            wanted = not isinstance(happens, str) or state.undecided(state.place_of(happens), happens)
            if wanted:
                return happens
            self.updates.drop([str(happens)])
        return None

    def _arrival(self, state: RoundState, client: str) -> int:
        """A place in a random order, which is another one after each arrival."""
        here = len(state.buffer), len(state.work)
        return ticket("arrival", self._federation.config.seed, state.round, *here, state.work[client].version, client)
