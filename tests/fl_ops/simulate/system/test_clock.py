"""The simulated time of assignments: who delivers when, by times that were computed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from fl_ops.simulate.system.clock import Amount, Clock, Course, Happening
from fl_ops.simulate.system.devices import Devices
from fl_ops.simulate.system.section import SystemSection

WORK = Amount(bytes_down=1000, gradients=60, bytes_up=500)
"""At 100 bytes a second down, 10 examples a second and 50 bytes a second up: 10 + 6 + 10 seconds."""
BASIC = {"speed": 10, "down": 100, "up": 50, "latency_s": 2}
MANY = [f"client-{index}" for index in range(4000)]


def clock(clients: list[str] | None = None, **section: Any) -> Clock:
    """A clock at 0."""
    return Clock(Devices(SystemSection.model_validate({**BASIC, **section}), clients or ["a", "b"], 0))


def assign(at: Clock, *clients: str, work: Amount = WORK, deadline_s: float = 1e9) -> None:
    """Begin the work of round 0."""
    at.assign(clients, lambda _: work, (0, 0, 0), deadline_s)


def happen(at: Clock) -> Happening:
    """Let the next thing happen."""
    happening = at.upcoming()
    assert happening is not None
    at.take(happening)
    return happening


def only(courses: list[Course]) -> Course:
    """The one course."""
    (course,) = courses
    return course


def test_the_times_of_an_assignment() -> None:
    """2 s of latency, 1000 bytes at 100 a second, 60 examples at 10 a second, 500 bytes at 50 a second."""
    at = clock()
    assign(at, "a")
    course = only(at.deliveries(9))
    assert (course.begins, course.downloaded, course.trained, course.finished) == (2, 12, 18, 28)
    assert (happen(at).kind, at.now) == ("delivery", 28)


def test_clients_arrive_by_their_times() -> None:
    """With 10, 20 and 5 examples the third comes first; with equal times the order is random but fixed."""
    at = clock(["a", "b", "c"])
    examples = {"a": 10, "b": 20, "c": 5}
    at.assign(examples, lambda client: Amount(0, examples[client], 0), (0, 0, 0), 1e9)
    assert [one.client for one in at.deliveries(9)] == ["c", "a", "b"]
    assert [one.client for one in at.deliveries(2)] == ["c", "a"]
    orders = set()
    for round_ in range(20):
        at = clock(["a", "b", "c"])
        at.assign(examples, lambda _: WORK, (round_, 0, 0), 1e9)
        orders.add(tuple(one.client for one in at.deliveries(9)))
    assert len(orders) == 6


def test_an_update_at_the_deadline_is_in_time() -> None:
    """28 s of work: in time for 28 s, late for 27.9; the late client continues after the deadline."""
    at = clock()
    assign(at, "a", deadline_s=28)
    assert happen(at).kind == "delivery"
    at = clock()
    assign(at, "a", deadline_s=27.9)
    assert (at.deliveries(9), happen(at).kind, at.now) == ([], "deadline", 27.9)
    assign(at, deadline_s=10)
    assert (happen(at).kind, at.now) == ("delivery", 28)


def test_a_client_of_a_later_attempt_begins_later() -> None:
    """Its times count from its own assignment."""
    at = clock()
    assign(at, "a")
    at.wait_until(5)
    assign(at, "b")
    assert [one.finished for one in at.deliveries(9)] == [28, 33]


def test_the_drop_out_rate() -> None:
    """Of 4000 assignments a share of 0.2 drops out, to 10 %, at times that are uniform over the assignment."""
    at = clock(MANY, drop_out=0.2)
    assign(at, *MANY)
    gone = at.cancel(MANY)
    gone = [one for one in gone if not one.delivers]
    assert len(gone) == pytest.approx(800, rel=0.1)
    assert sum(one.ends for one in gone) / len(gone) == pytest.approx(14, rel=0.1)
    times = [one.ends for one in gone]
    assert 0 <= min(times) < 1
    assert 27 < max(times) < 28


def test_drop_outs_depend_on_the_round_and_the_client() -> None:
    """The same names give the same drop-outs; another round or attempt gives others."""

    def dropped(*names: int) -> set[str]:
        at = clock(MANY[:100], drop_out=0.5)
        at.assign(MANY[:100], lambda _: WORK, names, 1e9)
        return {one.client for one in at.cancel(MANY) if not one.delivers}

    assert dropped(0, 0, 0) == dropped(0, 0, 0)
    assert len({frozenset(dropped(*names)) for names in ((0, 0, 0), (1, 0, 0), (0, 0, 1), (0, 1, 0))}) == 4


def test_a_client_that_goes_away_drops_out(tmp_path: Any) -> None:
    """It is lost when its interval ends, even if it comes back; one that is away when it is asked is lost at once."""
    path = tmp_path / "t.csv"
    path.write_text("client,begin_s,end_s\na,0,15\na,16,100\nb,3,100\n")
    at = clock(availability={"file": str(path)})
    assign(at, "a", "b")
    assert [(happen(at).kind, at.now) for _ in range(2)] == [("drop-out", 0), ("drop-out", 15)]


@pytest.mark.parametrize(
    ("now", "expected"),
    [(1, (0, 0)), (7, (500, 0)), (15, (1000, 0)), (23, (1000, 250)), (50, (1000, 500))],
)
def test_the_bytes_of_a_cancelled_client(now: float, expected: tuple[int, int]) -> None:
    """Downloads count from 2 s to 12 s, uploads from 18 s to 28 s."""
    at = clock()
    assign(at, "a")
    course = only(at.cancel(["a"]))
    assert course.transferred(now) == expected


def test_an_evaluation_delays_its_client_only() -> None:
    """An evaluator begins its next work after its evaluation; the time goes on only if the server waits for it."""
    at = clock()
    courses, until = at.evaluate(["a"], lambda _: Amount(1000, 60, 0), (0,), 1e9)
    assert (only(courses).finished, until, at.now) == (18, 18, 0)
    assign(at, "a", "b")
    assert [(one.client, one.finished) for one in at.deliveries(9)] == [("b", 28), ("a", 46)]


def test_an_evaluation_ends_at_its_deadline() -> None:
    """A client that needs 18 s delivers no metrics within 17 s, and the server waits no longer."""
    courses, until = clock().evaluate(["a"], lambda _: Amount(1000, 60, 0), (0,), 17)
    assert (only(courses).delivers, until) == (False, 17)
