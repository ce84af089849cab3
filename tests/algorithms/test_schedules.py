"""Schedules: their values in each round, and methods whose parameters follow them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import algorithms as fl
from algorithms.conformance.federation import Federation, Round, flat, parabolas, path

COSINE, LINEAR = fl.Schedule("cosine", end=0.1), fl.Schedule("linear", end=0.1)
STEP = fl.Schedule("step", milestones=(1, 3), factor=0.5)
CHANGING = {
    name: [parameter for parameter, declared in fl.parameters_of(name).items() if declared.per_round]
    for name in fl.names()
}


def values(schedule: fl.Schedule, start: float, rounds: int, count: int) -> list[float]:
    """The value in each of `count` rounds, of which `rounds` are planned."""
    return [schedule.value(start, t, rounds) for t in range(count)]


def test_values_by_hand() -> None:
    """From 0.5 over five rounds, and two rounds more: both ends are exact, and the last value stays."""
    assert values(fl.Schedule("constant"), 0.5, 5, 7) == [0.5] * 7
    assert values(LINEAR, 0.5, 5, 7) == pytest.approx([0.5, 0.4, 0.3, 0.2, 0.1, 0.1, 0.1])
    quarter = 0.1 + 0.4 * (1 + math.cos(math.pi / 4)) / 2
    assert values(COSINE, 0.5, 5, 7) == pytest.approx([0.5, quarter, 0.3, 0.6 - quarter, 0.1, 0.1, 0.1])
    assert values(STEP, 0.5, 5, 7) == [0.5, 0.25, 0.25, 0.125, 0.125, 0.125, 0.125]
    for schedule in (LINEAR, COSINE):
        assert values(schedule, 0.5, 5, 5)[::4] == [0.5, 0.1]


@pytest.mark.parametrize("schedule", [LINEAR, COSINE])
@pytest.mark.parametrize("start", [0.03, 1 / 3, 1.0])
def test_values_lie_between_both_ends(schedule: fl.Schedule, start: float) -> None:
    """So a range that has both ends has every value; and they move in one direction."""
    seen = values(schedule, start, 997, 997)
    assert seen in (sorted(seen), sorted(seen, reverse=True))
    assert (seen[0], seen[-1]) == (start, 0.1)


def test_a_run_of_one_round_has_its_first_value() -> None:
    """T = 1: nothing changes in round 0; an extension continues with the end."""
    assert values(COSINE, 0.5, 1, 3) == [0.5, 0.1, 0.1]


@pytest.mark.parametrize("name", fl.names())
def test_equal_values_are_no_schedule(federation: Federation, name: str) -> None:
    """For every method and parameter: the algorithm itself comes back, so no bit changes."""
    algorithm = fl.build(name)
    for parameter in CHANGING[name]:
        start = float(algorithm.parameters[parameter])
        for schedule in (
            fl.Schedule("constant"),
            fl.Schedule("cosine", end=start),
            fl.Schedule("linear", end=start),
            fl.Schedule("step", milestones=(2,), factor=1.0),
        ):
            assert all(fl.at_round(algorithm, {parameter: schedule}, t, 5) is algorithm for t in range(7))


@pytest.mark.parametrize("name", fl.names())
def test_a_schedule_changes_no_structure(federation: Federation, name: str) -> None:
    """Exchanges, payloads, memory and client state are those of round 0, also at neutral values."""
    algorithm = fl.build(name)
    for parameter in CHANGING[name]:
        neutral = {"alpha": 1.0, "mu": 0.0, "rho": 0.0, "eta_g": 0.5}.get(parameter, 1.0 if name == "mofedsam" else 0.0)
        other = fl.at_round(algorithm, {parameter: fl.Schedule("linear", end=neutral)}, 4, 5)
        assert other.parameters[parameter] == neutral
        assert [exchange.payloads for exchange in other.exchanges] == [
            exchange.payloads for exchange in algorithm.exchanges
        ]
        assert other.init(federation.x).memory.keys() == algorithm.init(federation.x).memory.keys()
        assert (other.keeps_client_state, other.needs_population) == (
            algorithm.keeps_client_state, algorithm.needs_population,
        )  # fmt: skip


def test_every_method_has_a_changing_server_rate() -> None:
    """eta_g of all methods; the local shares, rho and mu where they exist."""
    assert all("eta_g" in parameters for parameters in CHANGING.values())
    others = {name: set(parameters) - {"eta_g"} for name, parameters in CHANGING.items()}
    assert {name: names for name, names in others.items() if names} == {
        "fedcm": {"alpha"},
        "fedprox": {"mu"},
        "fedsam": {"rho"},
        "mime": {"beta"},
        "mimelite": {"beta"},
        "mofedsam": {"beta", "rho"},
        "qg": {"beta"},
    }


def scheduled(federation: Federation, algorithm: fl.Algorithm, schedules: fl.Schedules, rounds: int) -> list[float]:
    """The first entry of x after each of some planned rounds with all clients."""
    standing, seen = federation.start(algorithm), []
    for t in range(rounds):
        cohort = range(len(federation.clients))
        standing = federation.after(fl.at_round(algorithm, schedules, t, rounds), standing, Round(t, cohort))
        seen.append(flat(standing.server.x)[0].item())
    return seen


def test_server_rate_by_hand() -> None:
    """(y - 8)^2 / 2 from 0, eta_l = 0.5, one step: Dbar = (8 - x) / 2. eta_g 1, 0.5, 0.25 at milestones 1 and 2.

    x = 4;  x = 4 + 0.5 * 2 = 5;  x = 5 + 0.25 * 1.5 = 5.375.
    """
    one, schedule = parabolas(a=(8.0, 1)), fl.Schedule("step", milestones=(1, 2), factor=0.5)
    assert scheduled(one, fl.build("fedavg"), {"eta_g": schedule}, 3) == [4.0, 5.0, 5.375]


def test_local_share_by_hand() -> None:
    """FedCM on (y - 8)^2 / 2 from 0, eta_l = 0.5, one step: alpha = 1, then 0.5.

    Round 0: g = -8, d = -8, x = 4, Delta = -8.  Round 1: g = -4, d = 0.5 * -4 + 0.5 * -8 = -6, x = 7.
    """
    one = parabolas(a=(8.0, 1))
    schedules = {"alpha": fl.Schedule("linear", end=0.5)}
    assert scheduled(one, fl.build("fedcm", alpha=1.0), schedules, 2) == [4.0, 7.0]


def test_mime_uses_one_share_in_both_exchanges() -> None:
    """(y - 8)^2 / 2 from 0, eta_l = 0.5, one step, so d = m_{t+1}: beta = 0, then 0.5.

    Round 0: m = -8, x = 4.  Round 1: m = 0.5 * -4 + 0.5 * -8 = -6, x = 7.
    """
    one, schedules = parabolas(a=(8.0, 1)), {"beta": fl.Schedule("linear", end=0.5)}
    assert scheduled(one, fl.build("mime", beta=0.0), schedules, 2) == [4.0, 7.0]


def test_a_radius_that_ends_at_zero_ends_as_fedavg(federation: Federation) -> None:
    """FedSAM with rho 0.3, 0.15, 0: its last round is FedAvg's from the same state, bit for bit; the first is not."""
    fedsam, fedavg = fl.build("fedsam", rho=0.3), fl.build("fedavg", weights="uniform")
    schedules = {"rho": fl.Schedule("linear", end=0.0)}
    for t, equal in ((0, False), (1, False), (2, True)):
        method = fl.at_round(fedsam, schedules, t, 3)
        ours, theirs = (federation.run(algorithm, [Round(t)])[0].server.x for algorithm in (method, fedavg))
        assert torch.equal(flat(ours), flat(theirs)) is equal


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"kind": "cosin", "end": 0.1}, "kind: expected one of constant, linear, cosine, step; got 'cosin'"),
        ({"kind": "cosine"}, "end: expected a value with kind = 'cosine', got none"),
        ({"kind": "constant", "end": 0.1}, "end: expected no value with kind = 'constant'"),
        ({"kind": "step", "factor": 0.1}, "milestones: expected a value with kind = 'step', got none"),
        ({"kind": "step", "milestones": (5,)}, "factor: expected a value with kind = 'step', got none"),
        ({"kind": "step", "milestones": (5, 5), "factor": 0.1}, r"in order, got \[5, 5\]"),
        ({"kind": "step", "milestones": (5,), "factor": 0.0}, "factor: expected a number over 0, got 0"),
        ({"kind": "linear", "end": math.inf}, "end: expected a finite number, got inf"),
        ({"kind": "step", "milestones": tuple(range(101)), "factor": 0.9}, "expected at most 100, got 101"),
    ],
)
def test_wrong_schedules_are_refused(fields: dict[str, Any], expected: str) -> None:
    """Each message names the field."""
    with pytest.raises(fl.AlgorithmError, match=expected):
        fl.Schedule(**fields)


@pytest.mark.parametrize(
    ("method", "parameter", "schedule", "expected"),
    [
        ("fedcm", "alfa", COSINE, "unknown parameter of fedcm: 'alfa'. Did you mean 'alpha'?"),
        ("fedcm", "rho", COSINE, "unknown parameter of fedcm: 'rho'. .*Available: alpha, eta_g."),
        ("fedcm", "weights", COSINE, "expected a schedule for one of alpha, eta_g; weights is the same in all rounds"),
        ("feddyn", "alpha", COSINE, "expected a schedule for one of eta_g; alpha is the same in all rounds"),
        ("fedadam", "tau", COSINE, "tau is the same in all rounds"),
        ("fedcm", "alpha", replace(COSINE, end=0.0), "'alpha': expected a number over 0 and at most 1; got 0.0"),
        ("fedcm", "alpha", replace(STEP, factor=30.0), "'alpha': expected a number over 0 and at most 1; got 3.0"),
        ("fedavg", "eta_g", replace(STEP, factor=1e200), "a finite number in every round, got another in round 3"),
        ("fedavg", "eta_g", replace(STEP, factor=1e-200), "'eta_g': expected a number over 0; got 0.0"),
    ],
)
def test_schedules_that_a_method_cannot_have(method: str, parameter: str, schedule: fl.Schedule, expected: str) -> None:
    """An unknown or fixed parameter, and a value out of range in any round, before round 0."""
    with pytest.raises(fl.AlgorithmError, match=expected):
        fl.check_schedules(fl.build(method), {parameter: schedule}, 10)


def test_schedules_that_a_method_can_have() -> None:
    """With the parameters that options bring: rho with SAM, eta_g of another server optimizer."""
    built = fl.build("fedcm", gradient="sam", server_optimizer="adam")
    schedules = {"rho": COSINE, "alpha": COSINE, "eta_g": STEP}
    fl.check_schedules(built, schedules, 10)
    first, last = (fl.at_round(built, schedules, round_, 10).parameters for round_ in (0, 9))
    assert {name for name in first if first[name] != last[name]} <= set(schedules) <= first.keys()
    assert last["rho"] == last["alpha"] == 0.1


def test_a_schedule_of_shares_changes_the_path() -> None:
    """Without a schedule alpha stays, so the paths differ from round 1 on."""
    one = parabolas(a=(8.0, 1))
    plain = [x for (x,) in path(one, fl.build("fedcm", alpha=1.0), [Round(t, [0]) for t in range(2)])]
    assert plain == [4.0, 6.0]
