"""The devices of a run's clients: drawn from distributions, or read from files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from fl_ops.simulate.system.availability import (
    ALWAYS,
    Availability,
    Interval,
    Trace,
    draw_lognormal,
    draw_share,
    duty_cycle,
    read_trace,
    repeated,
)
from fl_ops.simulate.system.section import (
    RATE,
    SECONDS,
    SHARE,
    Column,
    DutyCycle,
    Intervals,
    Lognormal,
    Quantity,
    Range,
    SystemSection,
    Uniform,
)
from fl_server.errors import InvalidInput

_SECTION = "simulation.system"


@dataclass(frozen=True, slots=True)
class Device:
    """What a client's device needs for its work; the same in all rounds."""

    speed: float
    """Examples a second, for one gradient of each."""
    down: float
    """Bytes a second; infinity if a download takes no time."""
    up: float
    latency_s: float
    drop_out: float
    """Probability that it does not finish an assignment."""


class Devices:
    """The devices of all clients, and when they are there.

    Args:
        section: their distributions and files.
        clients: ids.
        seed: of the run. A client's device depends only on it and on the id.

    Raises:
        InvalidInput: a file of the section cannot be read, or does not fit.
    """

    def __init__(self, section: SystemSection, clients: Iterable[str], seed: int) -> None:
        self.section = section
        self.seed = seed
        self._clients = tuple(clients)
        self._traces: dict[str, Trace] = {}
        draws = {
            "speed": self._drawn("speed", section.speed, RATE),
            "down": self._drawn("down", math.inf if section.down is None else section.down, RATE),
            "up": self._drawn("up", math.inf if section.up is None else section.up, RATE),
            "latency_s": self._drawn("latency_s", section.latency_s, SECONDS),
            "drop_out": self._drawn("drop_out", section.drop_out, SHARE),
        }
        self._devices = {
            client: Device(**{name: draw(client) for name, draw in draws.items()}) for client in self._clients
        }
        self._availability = {
            client: Availability(intervals)
            for client, intervals in zip(self._clients, self._all_intervals(), strict=True)
        }

    def __getitem__(self, client: str) -> Device:
        return self._devices[client]

    def leaves(self, client: str, now: float) -> float | None:
        """When a client that is there at `now` goes away, in seconds of the run; None if it is away at `now`."""
        return self._availability[client].leaves(now)

    def present(self, clients: Iterable[str], now: float) -> tuple[str, ...]:
        """Those of the clients that are there."""
        if self.section.availability is None:
            return tuple(clients)
        return tuple(client for client in clients if self.leaves(client, now) is not None)

    def next_arrival(self, clients: Iterable[str], now: float) -> float | None:
        """When the next of the clients that are away comes back; None if none does."""
        comes = [self._availability[client].comes(now) for client in clients]
        return min((at for at in comes if now < at < math.inf), default=None)

    def _drawn(self, name: str, quantity: Quantity, allowed: Range) -> Callable[[str], float]:
        """The function from a client to its number."""
        match quantity:
            case Lognormal(median=median, sigma=sigma):
                return lambda client: draw_lognormal(median, sigma, draw_share(f"system-{name}", self.seed, client))
            case Uniform(low=low, high=high):
                return lambda client: low + (high - low) * draw_share(f"system-{name}", self.seed, client)
            case Column(file=file, column=column):
                trace = self._trace(f"{_SECTION}.{name}", file)
                return trace.of_clients(column, allowed, self._clients, self.seed).__getitem__
            case _:
                return lambda _: float(quantity)

    def _all_intervals(self) -> Iterator[Iterable[Interval]]:
        """The intervals of each client."""
        match self.section.availability:
            case DutyCycle() as cycle:
                yield from (duty_cycle(cycle, self.seed, client) for client in self._clients)
            case Intervals(file=file, repeat_s=period):
                key = f"{_SECTION}.availability"
                found = self._trace(key, file).intervals(SECONDS, self._clients, self.seed)
                _check_period(key, found.values(), period)
                yield from (repeated(found[client], period) for client in self._clients)
            case None:
                yield from ((ALWAYS,) for _ in self._clients)

    def _trace(self, key: str, file: str) -> Trace:
        """The file, which is read once for all settings that name it."""
        if file not in self._traces:
            self._traces[file] = read_trace(file=file, key=key)
        return Trace(key, file, self._traces[file].rows)


def _check_period(key: str, clients: Iterable[Sequence[Interval]], period: float | None) -> None:
    last = max(intervals[-1][1] for intervals in clients)
    if period is not None and last > period:
        raise InvalidInput(key, f"intervals that end within repeat_s = {period:g}", f"an end at {last:g}")
