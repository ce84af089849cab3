"""The day's budget: what fits, what survives a restart, and when a day ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from zoneinfo import ZoneInfo

import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from fl_client.errors import StateError
from fl_client.gates.state_directory import StateDirectory
from fl_client.policy.budget import Amounts, Budget, DailyUsage, OverBudget, Stopwatch
from fl_client.policy.config import Policy
from fl_client.policy.file import InForce

ZURICH = ZoneInfo("Europe/Zurich")


class Clock:
    """A clock that a test sets."""

    def __init__(self, *moment: int) -> None:
        self.set(*moment)

    def set(self, *moment: int) -> None:
        """Local time in Zurich."""
        year, month, day, *rest = moment
        self.now = datetime(year, month, day, *rest, tzinfo=ZURICH).timestamp()  # type: ignore[arg-type,misc]

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def logs() -> Iterator[list[EventDict]]:
    """The log."""
    with capture_logs() as lines:
        yield lines


def budget(path: Path, clock: Clock, **day: Any) -> Budget:
    """The budget of a daemon that starts now."""
    policy = Policy.model_validate({"day": day, "hours": {"timezone": "Europe/Zurich"}})
    file: Any = SimpleNamespace(now=InForce(policy))
    return Budget(DailyUsage(path, clock), cast(StateDirectory, DirectState()), file)


class DirectState:
    """A state directory without a thread."""

    async def run(self, function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """See StateDirectory."""
        function(*args, **kwargs)

    required = run


async def test_work_is_charged_before_it_begins_and_survives_the_process(tmp_path: Path) -> None:
    """The next process finds the counts on disk, although this one never closed anything."""
    clock, path = Clock(2026, 11, 2, 9), tmp_path / "usage.json"
    await budget(path, clock, max_steps=100).charge(Amounts(1, 60, 600))
    after = budget(path, clock, max_steps=100)
    assert after.used == Amounts(1, 60, 600)
    with pytest.raises(OverBudget, match="max_steps is 100, 60 of it is used today, and the assignment needs 41"):
        await after.charge(Amounts(1, 41, 410))
    assert after.used.assignments == 1
    closed = after.closed()
    assert closed is not None
    assert closed.until == datetime(2026, 11, 3, tzinfo=ZURICH).timestamp()


@pytest.mark.parametrize(
    ("limit", "need"),
    [
        ({"max_assignments": 2}, Amounts(assignments=1)),
        ({"max_examples": 20}, Amounts(1, 1, 10)),
        ({"max_steps": 2}, Amounts(1, 1, 1)),
    ],
)
async def test_each_amount_is_used_up_when_its_limit_is_reached(
    tmp_path: Path, limit: dict[str, int], need: Amounts
) -> None:
    """Two assignments fit, and after them the device reports that it takes no work until midnight."""
    used = budget(tmp_path / "usage.json", Clock(2026, 11, 2, 9), **limit)
    await used.charge(need)
    assert used.closed() is None
    await used.charge(need)
    closed = used.closed()
    assert closed is not None
    assert closed.detail == f"the day's budget is used up (day.{next(iter(limit))})"
    with pytest.raises(OverBudget):
        used.check(Amounts())


def test_work_that_no_day_has_room_for_is_refused_without_closing_the_day(tmp_path: Path) -> None:
    """Smaller work of other runs still fits."""
    fresh = budget(tmp_path / "usage.json", Clock(2026, 11, 2, 9), max_steps=100)
    with pytest.raises(OverBudget, match="max_steps is 100, and the assignment needs 101"):
        fresh.check(Amounts(1, 101, 1))
    assert fresh.closed() is None
    fresh.check(Amounts(1, 100, 1))


def test_bytes_are_counted_as_they_come(tmp_path: Path) -> None:
    """A coordinator that sends more than it announced is stopped at the limit."""
    used = budget(tmp_path / "usage.json", Clock(2026, 11, 2, 9), max_bytes_down=100, max_bytes_up=50)
    used.received(100)
    with pytest.raises(OverBudget, match="max_bytes_down is 100, and more has arrived"):
        used.received(1)
    used = budget(tmp_path / "usage.json", Clock(2026, 11, 2, 9), max_bytes_up=50)
    used.sent(30)
    used.check(Amounts(bytes_up=20))
    with pytest.raises(OverBudget):
        used.check(Amounts(bytes_up=21))


async def test_a_new_day_has_a_new_budget(tmp_path: Path) -> None:
    """It begins at midnight of the policy's time zone, also after an amount that did not fit."""
    clock, path = Clock(2026, 11, 2, 23, 59), tmp_path / "usage.json"
    used = budget(path, clock, max_steps=10)
    await used.charge(Amounts(1, 6, 6))
    with pytest.raises(OverBudget):
        await used.charge(Amounts(1, 5, 5))
    assert used.closed() is not None
    clock.set(2026, 11, 3, 0, 0)
    assert used.closed() is None
    await used.charge(Amounts(1, 5, 5))
    assert budget(path, clock, max_steps=10).used == Amounts(1, 5, 5)


async def test_a_clock_that_is_behind_gives_no_new_budget(tmp_path: Path, logs: list[EventDict]) -> None:
    """A board without a battery starts in 1970. The counts of the real day stay, and the log names the file."""
    clock, path = Clock(2026, 11, 2, 9), tmp_path / "usage.json"
    await budget(path, clock, max_steps=10).charge(Amounts(1, 10, 10))
    clock.set(1970, 1, 2)
    behind = budget(path, clock, max_steps=10)
    assert behind.closed() is not None
    assert [line["event"] for line in logs] == ["clock_behind"]
    clock.set(2026, 11, 2, 10)
    assert behind.closed() is not None


async def test_seconds_are_counted_while_the_work_runs(tmp_path: Path) -> None:
    """A save in the middle of the work has the seconds so far, so that SIGKILL loses few of them."""
    clock, path = Clock(2026, 11, 2, 9), tmp_path / "usage.json"
    used = budget(path, clock, max_seconds=1000)
    with used.computing():
        while used.seconds_left() > 999.99:
            pass
        await used.save()
        kept = budget(path, clock, max_seconds=1000).used.seconds
    assert 0.01 <= kept < 60
    assert used.seconds_left() <= 1000 - kept


def test_a_stopwatch_counts_each_second_once() -> None:
    """However often it is read while it runs."""
    times = iter([0.0, 2.0, 2.0, 5.0])
    watch = Stopwatch(lambda: next(times))
    watch.start()
    assert watch.take() == 2.0
    watch.stop()
    assert (watch.take(), watch.take()) == (3.0, 0.0)


@pytest.mark.parametrize(
    "content", ["", "[]", '{"day": 3}', '{"day": "2026-11-02", "steps": -1}', '{"day": "2026-11-02", "steps": "many"}',
                '{"day": "2026-11-02", "seconds": NaN}', '{"day": "2026-11-02", "watts": 1}'],
)  # fmt: skip
def test_a_file_of_something_else_is_no_empty_day(tmp_path: Path, content: str) -> None:
    """Counts that cannot be read do not count as zero: the owner decides."""
    path = tmp_path / "usage.json"
    path.write_text(content)
    with pytest.raises(StateError, match=r"usage\.json: expected the day's counts .* remove the file to count from 0"):
        DailyUsage(path, Clock(2026, 11, 2))


async def test_without_limits_nothing_is_written(tmp_path: Path) -> None:
    """A device without a budget writes no file for each assignment."""
    path = tmp_path / "usage.json"
    free = budget(path, Clock(2026, 11, 2, 9))
    await free.charge(Amounts(1, 10, 10))
    await free.save()
    assert DailyUsage(path, Clock(2026, 11, 2, 9)).used == Amounts()
