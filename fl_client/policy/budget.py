"""The day's budget: what an assignment may still use, counted on disk before and while it is used."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import date, datetime, timedelta, tzinfo
from datetime import time as time_of_day
from pathlib import Path
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

import structlog

from fl_client.errors import StateError
from fl_client.gates.gate_set import ClosedGate
from fl_common.files import atomic_writer
from protos.fl.v1.coordinator_pb2 import UNAVAILABLE_REASON_OWNER

if TYPE_CHECKING:  # `fl-client policy` reads the counts, and is quick without torch and grpc
    from fl_client.gates.state_directory import StateDirectory
    from fl_client.policy.file import PolicyFile

log = structlog.get_logger()

FILE = "usage.json"
"""Name of the file in the state directory."""


@dataclass(frozen=True, slots=True)
class Amounts:
    """Amounts of work. In the file they are those of one day."""

    assignments: int = 0
    steps: int = 0
    examples: int = 0
    seconds: float = 0.0
    bytes_down: int = 0
    bytes_up: int = 0

    def __add__(self, other: Amounts) -> Amounts:
        return Amounts(**{name: getattr(self, name) + getattr(other, name) for name in NAMES})


NAMES = tuple(field.name for field in fields(Amounts))


class DailyUsage:
    """The counts of one day. Not thread-safe; `write` alone may run on another thread."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        """Read the file, if there is one. clock: Unix seconds. Raises StateError for a file that is not this one's."""
        self._path, self._clock = path, clock
        self._zone: tzinfo | None = None
        self._day, self.used = _read(path)
        self._warned = False

    def set_zone(self, name: str) -> None:
        """Days are those of this time zone. "": the device's own."""
        self._zone = ZoneInfo(name) if name else None

    def roll(self) -> bool:
        """Start a new day if there is one. Returns whether the counts began again."""
        today = self._today()
        if self._day is None or today > self._day:
            began, self._day, self.used = self._day is not None, today, Amounts()
            return began
        if today < self._day and not self._warned:
            self._warned = True
            log.warning(
                "clock_behind", counts_of=str(self._day), today=str(today),
                todo=f"set the clock; if the counts are of a wrong day, end the daemon and remove {self._path}",
            )  # fmt: skip
        return False

    def add(self, amounts: Amounts) -> None:
        """Count work in memory."""
        self.roll()
        self.used += amounts

    def content(self) -> bytes:
        """The file's content as it should be now."""
        return json.dumps({"day": str(self._day or self._today()), **asdict(self.used)}).encode()

    def write(self, content: bytes, *, durable: bool = False) -> None:
        """Write the file; blocking. durable: it survives a power cut too. Raises OSError."""
        with atomic_writer(self._path, part=self._path.with_suffix(".part"), durable=durable) as file:
            file.write(content)

    def midnight(self) -> float:
        """Unix seconds of the day's end."""
        tomorrow = self._today() + timedelta(days=1)
        return datetime.combine(tomorrow, time_of_day(), self._zone).astimezone().timestamp()

    def _today(self) -> date:
        return datetime.fromtimestamp(self._clock(), self._zone).date()


def _read(path: Path) -> tuple[date | None, Amounts]:
    try:
        content = json.loads(path.read_bytes())
        day = date.fromisoformat(content.pop("day"))
        used = Amounts(**content)
        if not all(_is_amount(getattr(used, name)) for name in NAMES):
            raise ValueError("an amount is no number of 0 or more")
    except FileNotFoundError:
        return None, Amounts()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise StateError(
            f"{path}: expected the day's counts that this daemon wrote, got {error}; remove the file to count from 0"
        ) from None
    return day, used


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


GATE = "policy_day"
"""Name of the used-up budget among the reasons for which the device takes no work."""


class OverBudget(Exception):
    """The work does not fit the day's budget. `str()` names the key, the limit and the need."""


class Budget:
    """Counts the work of the day against [day]. Lives on the event loop; `computing` belongs to the worker's thread."""

    def __init__(self, usage: DailyUsage, state: StateDirectory, file: PolicyFile) -> None:
        self._usage, self._state, self._file = usage, state, file
        usage.set_zone(file.now.policy.hours.timezone)
        self._full_for = ""
        """The amount that did not fit today: smaller work is not tried, because the coordinator chooses its size."""
        self._written = usage.content()
        self._watch = Stopwatch()

    @property
    def limited(self) -> bool:
        """Whether there is any limit for a day."""
        return any(limit is not None for _, limit in self._limits())

    @property
    def used(self) -> Amounts:
        """The counts of the current day."""
        self._roll()
        return self._usage.used

    def check(self, need: Amounts, names: Collection[str] = NAMES) -> None:
        """Raises OverBudget unless these amounts of some work fit into what is left of the day."""
        self._roll()
        for name, limit in self._limits():
            if name not in names:
                continue
            wanted, used = getattr(need, name), getattr(self._usage.used, name)
            if limit is None or (used < limit and used + wanted <= limit):
                continue
            key = f"day.max_{name} is {limit:g}"
            if wanted > limit:
                raise OverBudget(f"{key}, and the assignment needs {wanted:g}")
            self._full_for = name
            raise OverBudget(f"{key}, {used:g} of it is used today, and the assignment needs {wanted:g}")

    async def charge(self, need: Amounts) -> None:
        """Count work that begins now, durably. Raises OverBudget; WorkFailed if it cannot be written."""
        self.check(need)
        self._usage.add(Amounts(assignments=need.assignments, steps=need.steps, examples=need.examples))
        if self.limited:
            await self._save(durable=True)

    def received(self, count: int) -> None:
        """Count tensor bytes that arrived. Raises OverBudget beyond the limit."""
        self._usage.add(Amounts(bytes_down=count))
        limit = self._file.now.policy.day.max_bytes_down
        if limit is not None and self._usage.used.bytes_down > limit:
            self._full_for = "bytes_down"
            raise OverBudget(f"day.max_bytes_down is {limit}, and more has arrived")

    def sent(self, count: int) -> None:
        """Count tensor bytes that were sent."""
        self._usage.add(Amounts(bytes_up=count))

    def seconds_left(self) -> float:
        """Seconds of computing that are left of the day."""
        limit = self._file.now.policy.day.max_seconds
        return math.inf if limit is None else max(0.0, limit - self._usage.used.seconds - self._watch.running())

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Count the seconds of the block."""
        self._watch.start()
        try:
            yield
        finally:
            self._watch.stop()

    def closed(self) -> ClosedGate | None:
        """Why the device takes no work until midnight. None while something is left of every amount."""
        self._roll()
        used_up = [
            name for name, limit in self._limits() if limit is not None and getattr(self._usage.used, name) >= limit
        ]
        if not used_up and not self._full_for:
            return None
        name = used_up[0] if used_up else self._full_for
        detail = f"the day's budget is used up (day.max_{name})"
        return ClosedGate(GATE, UNAVAILABLE_REASON_OWNER, detail, self._usage.midnight())

    async def save(self) -> None:
        """Count the seconds so far, and write the counts if they have changed."""
        self._usage.add(Amounts(seconds=self._watch.take()))
        if self.limited and self._usage.content() != self._written:
            try:
                await self._save(durable=False)
            except OSError as error:
                log.warning("usage_not_written", reason=str(error))

    def rules_changed(self) -> None:
        """What did not fit may fit now, and the day may end at another time."""
        self._full_for = ""
        self._usage.set_zone(self._file.now.policy.hours.timezone)

    async def _save(self, *, durable: bool) -> None:
        """Durable counts are written before work begins, which is not done without them."""
        content, write = self._usage.content(), self._state.required if durable else self._state.run
        await write(self._usage.write, content, durable=durable)
        self._written = content

    def _roll(self) -> None:
        if self._usage.roll():
            self._full_for = ""

    def _limits(self) -> Iterator[tuple[str, float | None]]:
        rules = self._file.now.policy.day
        return ((name, getattr(rules, f"max_{name}")) for name in NAMES)


class Stopwatch:
    """Seconds of one activity, started and stopped on one thread and read on another."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic, self._lock = monotonic, threading.Lock()
        self._since: float | None = None
        self._kept = 0.0

    def start(self) -> None:
        """The activity begins."""
        with self._lock:
            self._since = self._monotonic()

    def stop(self) -> None:
        """The activity ends."""
        with self._lock:
            self._kept, self._since = self._total(), None

    def running(self) -> float:
        """Seconds that were not taken yet."""
        with self._lock:
            return self._total()

    def take(self) -> float:
        """The seconds since the last call, which are counted from now on."""
        with self._lock:
            total, self._kept = self._total(), 0.0
            if self._since is not None:
                self._since = self._monotonic()
            return total

    def _total(self) -> float:
        return self._kept + (0.0 if self._since is None else self._monotonic() - self._since)
