"""How the ends of a client's assignments are counted."""

import json

import pytest

from fl_server.store.client_work import (
    MOST_PACKAGES,
    MOST_TEXT,
    NEWEST,
    Arrived,
    ClientWork,
    EndedWork,
    Timing,
    timings,
)

FAILED = EndedWork("r", 3, "KeyError at task.py:41", "KeyError: 'age'", 9.0)


def test_each_end_is_counted_and_the_latest_reasons_stay() -> None:
    """The total is the sum of the ends, and a share is of the total."""
    work = ClientWork().ended("failed", FAILED).ended("refused", FAILED._replace(cause="norm")).ended("lost")
    work = work.in_round(2, None)
    assert (work.admitted, work.refused, work.failed, work.lost, work.assignments) == (2, 1, 1, 1, 5)
    assert work.newest == ("failed", "refused", "lost", "admitted", "admitted")
    assert work.last_failure == FAILED
    assert work.last_refusal is not None
    assert work.last_refusal.cause == "norm"
    assert work.share("failed") == 0.2


def test_work_is_counted_by_package() -> None:
    """Of the latest packages; work without one is not. An update that is refused later has ended its work before."""
    work = ClientWork().with_package("").with_package("one").with_package("two", failed=True)
    work = work.with_package("one", ended=0, failed=True)
    assert work.packages == {"two": (1, 1), "one": (1, 1)}
    assert ClientWork.of(json.loads(json.dumps(work.to_values()))) == work
    for number in range(MOST_PACKAGES):
        work = work.with_package(str(number))
    assert list(work.packages) == [str(number) for number in range(MOST_PACKAGES)]


def test_a_long_reason_is_cut() -> None:
    """The record of a client is read with every list."""
    work = ClientWork().ended("failed", FAILED._replace(message="x" * 5000))
    assert work.last_failure is not None
    assert len(work.last_failure.message) == MOST_TEXT


def test_only_the_newest_are_kept_and_a_release_forgives_them() -> None:
    """The totals stay."""
    work = ClientWork()
    for _ in range(NEWEST + 5):
        work = work.ended("failed", FAILED).in_round(1, Timing(1.0, 0.5, True, 2.0))
    assert (len(work.newest), len(work.timings)) == (NEWEST, NEWEST)
    released = work.released()
    assert (released.newest, released.timings, released.failed, released.rounds_last) == ((), (), 25, 25)
    assert released.last_failure == FAILED


@pytest.mark.parametrize("work", [ClientWork(), ClientWork().ended("failed", FAILED).ended("lost")])
def test_values_come_back_from_json(work: ClientWork) -> None:
    """An empty record is an empty object."""
    full = work.in_round(1, Timing(1.5, None, True, None))
    for record in (work, full):
        assert ClientWork.of(json.loads(json.dumps(record.to_values()))) == record
    assert ClientWork().to_values() == {}


def test_times_are_compared_with_the_other_clients_of_the_round() -> None:
    """The others of c take 1 and 3 seconds, so 2 in the middle; c takes 8 and comes last."""
    times = timings([Arrived("a", 1.0, 0.5, 0.5), Arrived("b", 3.0, 2.0, 1.0), Arrived("c", 8.0, 6.0, 2.0)])
    assert times["c"] == Timing(6.0, 2.0, True, 4.0)
    assert [times[name].last for name in "ab"] == [False, False]
    assert times["a"].slowness == pytest.approx(1.0 / 5.5, abs=1e-4)


def test_a_client_alone_is_last_of_nobody() -> None:
    """A round without another client says nothing of who is slow; times that are not known are not guessed."""
    assert timings([Arrived("a", 1.0, 0.5, 0.5)])["a"] == Timing(0.5, 0.5, None, None)
    assert timings([Arrived("a", 1.0, None, 0.5), Arrived("b", 2.0, 1.0, 1.0)])["b"].slowness is None
    assert timings([]) == {}


def test_medians_are_of_the_known_values() -> None:
    """A round in which the coordinator restarted has no times."""
    work = ClientWork().in_round(1, Timing(None, None, False, None))
    assert work.usual("work_s") is None
    for seconds in (1.0, 5.0, 2.0):
        work = work.in_round(1, Timing(seconds, 0.0, seconds > 4, None))
    assert (work.usual("work_s"), work.newest_rounds(), work.last_share) == (2.0, (4, 1), 0.25)
