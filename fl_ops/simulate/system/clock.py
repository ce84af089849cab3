"""The simulated time of a run: the clients at work, and what happens next to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fl_ops.simulate.system.availability import draw_share
from fl_ops.simulate.system.devices import Device, Devices
from fl_server.rounds.sampling import ticket


@dataclass(frozen=True, slots=True)
class Amount:
    """What a client has to do for an assignment."""

    bytes_down: int
    """Tensor bytes that it does not hold."""
    gradients: int
    """Number of examples of all local batches; an example of which two gradients are taken counts twice."""
    bytes_up: int


@dataclass(frozen=True, slots=True)
class Course:
    """When one client does what for an assignment, in seconds since the start of the run."""

    client: str
    amount: Amount
    begins: float
    """The assignment reaches the client, the latency included."""
    downloaded: float
    trained: float
    finished: float
    """The server has the whole upload."""
    ends: float
    """The server has the upload, or notices that the client is gone."""
    delivers: bool = True
    """Whether the client finishes."""

    def ended(self, at: float) -> Course:
        """The course if the client is gone at a time; the same if it has finished by then."""
        return self if self.finished <= at else replace(self, ends=min(at, self.ends), delivers=False)

    def transferred(self, now: float) -> tuple[int, int]:
        """Bytes (down, up) until `now`; a transfer that is under way has come as far as its time."""
        until = min(now, self.ends)
        down, up = self.amount.bytes_down, self.amount.bytes_up
        return _share(down, self.begins, self.downloaded, until), _share(up, self.trained, self.finished, until)


def course(client: str, device: Device, amount: Amount, assigned: float) -> Course:
    """The course of an assignment that nothing interrupts.

    assigned: when the client gets to it, in seconds since the start of the run.
    """
    begins = assigned + device.latency_s
    downloaded = begins + amount.bytes_down / device.down
    trained = downloaded + amount.gradients / device.speed
    finished = trained + amount.bytes_up / device.up
    return Course(client, amount, begins, downloaded, trained, finished, finished)


def _share(size: int, begin: float, end: float, now: float) -> int:
    if now >= end:
        return size
    return int(size * (now - begin) / (end - begin)) if now > begin else 0


Names = tuple[int, ...]
"""What identifies an assignment of a client, such as round, exchange and attempt."""


@dataclass(frozen=True, slots=True)
class Happening:
    """The next thing that happens: a client delivers or is gone, or a deadline passes."""

    kind: Literal["delivery", "drop-out", "deadline"]
    at: float
    course: Course | None = None
    """The client's; None for the deadline."""
    names: Names = ()
    """What identifies the assignment that the deadline is of."""


@dataclass(frozen=True, slots=True)
class ClockPoint:
    """A clock between two rounds."""

    now: float
    busy: Mapping[str, float]
    """When clients that evaluate are done."""


class Clock:
    """Simulated seconds since the start of the run. They never go back.

    A client that drops out, or goes away, before it has finished loses the work of that assignment, and the server
    notices at once. A client works for one assignment at a time.
    """

    def __init__(self, devices: Devices, *, each_draw: bool = False) -> None:
        """each_draw: every assignment has a deadline of its own. False: the latest one replaces those before."""
        self.devices = devices
        self.now = 0.0
        self._each_draw = each_draw
        self._deadlines: list[tuple[float, Names]] = [] if each_draw else [(0.0, ())]
        """Those to come, in order."""
        self._working: list[Course] = []
        self._busy: dict[str, float] = {}

    def assign(self, clients: Iterable[str], amount: Callable[[str], Amount], names: Names, deadline_s: float) -> None:
        """Begin work of these clients, and start the deadline again. Others continue with theirs."""
        own = (self.now + deadline_s, names)
        self._deadlines = [*self._deadlines, own] if self._each_draw else [own]
        self._working += [self._course(client, amount(client), ("training", *names)) for client in clients]
        # Of clients that end together, none is favoured by its name.
        seed = self.devices.seed
        self._working.sort(key=lambda one: (one.ends, ticket("arrival", seed, names[0], one.client)))

    def deliveries(self, most: int) -> list[Course]:
        """The clients that deliver before the deadline, in this order: `most` at most."""
        return [one for one in self._working if one.delivers and one.ends <= self._deadlines[0][0]][:most]

    def delivers(self, client: str) -> bool:
        """Whether a client that works finishes, if nothing ends its work."""
        return any(one.delivers for one in self._working if one.client == client)

    def upcoming(self) -> Happening | None:
        """What happens next. An update that comes at the deadline is in time. None: nobody works, without a deadline.

        If every draw has a deadline and nobody works, the deadlines concern nobody.
        """
        if self._each_draw and not self._working:
            self._deadlines = []
        if self._working and (not self._deadlines or self._working[0].ends <= self._deadlines[0][0]):
            first = self._working[0]
            return Happening("delivery" if first.delivers else "drop-out", first.ends, first)
        return Happening("deadline", self._deadlines[0][0], names=self._deadlines[0][1]) if self._deadlines else None

    def take(self, happening: Happening) -> None:
        """Let it happen: it is that time now, and its client works no more."""
        self.wait_until(happening.at)
        if happening.course is not None:
            self._working.remove(happening.course)
        elif self._each_draw:
            self._deadlines = self._deadlines[1:]

    def cancel(self, clients: Iterable[str]) -> list[Course]:
        """End the work of these clients now. Returns what they were doing."""
        gone = set(clients)
        cancelled = [one for one in self._working if one.client in gone]
        self._working = [one for one in self._working if one.client not in gone]
        return cancelled

    def evaluate(
        self, clients: Sequence[str], amount: Callable[[str], Amount], names: Names, deadline_s: float
    ) -> tuple[list[Course], float]:
        """Begin an evaluation on clients.

        Returns its courses, and when the server has all metrics that come within the deadline. A client that trains
        next begins after its evaluation.
        """
        deadline = self.now + deadline_s
        courses = [self._course(client, amount(client), ("evaluation", *names)) for client in clients]
        courses = [one.ended(deadline) for one in courses]
        self._busy = {one.client: one.ends for one in courses}
        return courses, max((one.ends for one in courses), default=self.now)

    @property
    def point(self) -> ClockPoint:
        """The clock after a round, also if the next one has begun but nothing has happened in it."""
        return ClockPoint(self.now, dict(self._busy))

    def continue_from(self, point: ClockPoint) -> None:
        """Put a new clock where another one was."""
        self.now, self._busy = point.now, dict(point.busy)

    def wait_until(self, at: float) -> None:
        """It is that time now, if it is later."""
        self.now = max(self.now, at)

    def _course(self, client: str, amount: Amount, names: tuple[object, ...]) -> Course:
        """The course of an assignment, ended early if the client drops out or goes away."""
        device, seed = self.devices[client], self.devices.seed
        whole = course(client, device, amount, max(self.now, self._busy.get(client, 0.0)))
        leaves = self.devices.leaves(client, self.now)
        whole = whole.ended(self.now if leaves is None else leaves)
        if draw_share("drop-out", seed, *names, client) >= device.drop_out:
            return whole
        at = self.now + draw_share("drop-out-time", seed, *names, client) * (whole.finished - self.now)
        return replace(whole, ends=min(at, whole.ends), delivers=False)
