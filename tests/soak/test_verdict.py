"""The verdict: each kind of leak is found, and normal variation is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.soak.resources import Resources, Sample
from tests.soak.verdict import Observed, allowed_mb, faults, over_time, slope_mb_per_hour


def held(number: int = 0, **more: float) -> Resources:
    """Resources of a process at sample `number`, 15 s apart, with these amounts added."""
    usual: dict[str, Any] = {"rss_mb": 300.0, "files": 7, "sockets": 8, "others": 5, "threads": 17, "state_files": 9}
    return Resources(at_s=15.0 * number, **{name: value + more.get(name, 0) for name, value in usual.items()})


def sample(number: int = 0, **more: float) -> Sample:
    """A coordinator without clients, with these amounts added."""
    usual: dict[str, Any] = {"tasks": 30, "sessions": 0, "present": 0, "series": 200}
    log = {"log": 4.2 + more.get("log", 0)}
    return Sample(
        held(number, **more), **{name: value + more.get(name, 0) for name, value in usual.items()}, disk_mb=log
    )


def observed(**changes: Any) -> Observed:
    """A soak of 40 samples without leaks except for the changes."""
    numbers = range(40)
    flat = Observed(
        base=sample(),
        samples=[sample(number, rss_mb=number % 3) for number in numbers],
        steady=[held(number, rss_mb=number % 2, state_files=number % 3) for number in numbers],
        after=sample(),
        checkpoints={"long": 3, "short-1": 2},
        keep=2,
    )
    return replace(flat, **changes)


def test_a_soak_without_leaks_has_no_faults() -> None:
    """Memory and the number of state files vary, and three checkpoints remain with keep = 2."""
    assert faults(observed()) == []


LEAKS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "coordinator memory": (lambda: {"samples": [sample(n, rss_mb=n) for n in range(40)]}, "coordinator: 338.0 MB"),
    "daemon memory": (lambda: {"steady": [held(n, rss_mb=n) for n in range(40)]}, "steady daemon: 338.0 MB"),
    "daemon files": (lambda: {"steady": [held(n, files=n) for n in range(40)]}, "files grew from 26 to 46"),
    "daemon state": (lambda: {"steady": [held(n, state_files=n) for n in range(40)]}, "state_files grew"),
    "file": (lambda: {"after": sample(files=1)}, "8 open files without clients at the end, 7 at the start"),
    "socket": (lambda: {"after": sample(sockets=1)}, "9 sockets"),
    "pipe": (lambda: {"after": sample(others=1)}, "6 other descriptors"),
    "threads": (lambda: {"after": sample(threads=5)}, "22 threads"),
    "task": (lambda: {"after": sample(tasks=1)}, "31 tasks without clients at the end, 30 at the start"),
    "session": (lambda: {"after": sample(sessions=1)}, "1 sessions"),
    "client": (lambda: {"after": sample(present=1)}, "1 attached clients"),
    "spool": (lambda: {"spool": ["spool/run-a"]}, "1 left in the spool, first spool/run-a"),
    "checkpoints": (lambda: {"checkpoints": {"long": 4}}, "4 checkpoints of long, 2 to be kept"),
    "log": (lambda: {"after": sample(log=20)}, "ledger's log had 24.2 MB"),
    "fault": (lambda: {"faults": ["edge-1 ended by itself with 1"]}, "edge-1 ended by itself"),
    "too short": (lambda: {"samples": [sample(n) for n in range(5)]}, "expected 6 samples or more"),
}


@pytest.mark.parametrize(("changes", "text"), LEAKS.values(), ids=LEAKS.keys())
def test_a_leak_of_each_kind_is_found_and_named(changes: Callable[[], dict[str, Any]], text: str) -> None:
    """One leak gives one fault that names it."""
    (fault,) = faults(observed(**changes()))
    assert text in fault


def test_the_number_of_threads_may_vary() -> None:
    """The size of grpc's own thread pool varies by a few."""
    assert faults(observed(after=sample(threads=4))) == []


def test_memory_is_allowed_two_percent_and_four_megabytes() -> None:
    """300 MB in the middle allow 306 + 4 at the end, and no more."""
    assert allowed_mb(300.0) == pytest.approx(310.0)
    rise = [sample(number, rss_mb=0 if number < 30 else 10.1) for number in range(40)]
    assert len(faults(observed(samples=rise))) == 1
    assert faults(observed(samples=[replace(each, held=replace(each.held, rss_mb=300.0)) for each in rise])) == []


def test_start_middle_and_end_are_medians_of_three() -> None:
    """Of 9, 1, 2 | 3, 90, 5 | 6, 7, 0: the medians are 2, 5 and 6."""
    assert over_time([9, 1, 2, 3, 90, 5, 6, 7, 0]) == (2, 5, 6)


def test_the_slope_is_that_of_the_second_half() -> None:
    """A jump in the first half does not count. Then 1 MB in each 15 s is 240 MB an hour."""
    jump = [held(number, rss_mb=100 if number < 20 else number) for number in range(40)]
    assert slope_mb_per_hour(jump) == pytest.approx(240.0)
    assert slope_mb_per_hour(jump[:1]) == 0.0
