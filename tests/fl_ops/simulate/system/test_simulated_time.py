"""Runs with simulated time: who counts, when rounds end, and which bytes are transferred."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fl_ops.simulate.output.console import round_line
from fl_ops.simulate.output.results import write_rounds
from fl_ops.simulate.reports import RoundResult
from fl_ops.simulate.simulation import Simulation
from fl_server.rounds.effects import RETRY_S
from tests.fl_ops.simulate.conftest import Simulated
from tests.marks import slow_except

EXAMPLES = 30
"""Of each of the four clients."""
MODEL = 60
"""Bytes."""
GOAL = {"close": "goal", "clients_per_round": 2, "over_selection": 2}
"""All four clients are drawn, and the first two count."""

Run = Callable[..., list[RoundResult]]


@pytest.fixture
def run(simulated: Simulated) -> Run:
    """All rounds of a run of FedAvg with this [simulation.system]."""

    def make(system: dict[str, Any] | None, **sections: Any) -> list[RoundResult]:
        simulation = {**sections.pop("simulation", {}), **({} if system is None else {"system": system})}
        with simulated(**{"algorithm": {"name": "fedavg"}, "simulation": simulation, **sections}) as it:
            return list(it.rounds())

    return make


@pytest.fixture
def four(tmp_path: Path) -> dict[str, Any]:
    """Four devices that need 4 + 30 / speed seconds for a round: 34, 7, 14 and 10 s."""
    path = tmp_path / "devices.csv"
    path.write_text("client,speed\nc0,1\nc1,10\nc2,3\nc3,5\n")
    return {"speed": {"file": str(path), "column": "speed"}, "down": MODEL, "up": MODEL / 2, "latency_s": 1}


def ending(simulation: Simulation) -> tuple[str, str]:
    """Status and reason of a run that has ended."""
    assert simulation.ending is not None
    return simulation.ending


def times(rounds: list[RoundResult]) -> list[Any]:
    """The simulated seconds of each round."""
    return [pytest.approx(done.simulated_s) for done in rounds]


@pytest.mark.parametrize("algorithm", slow_except(["fedavg", "fedcm", "mime", "scaffold"], "mime", "scaffold"))
def test_a_whole_cohort_gives_the_same_models(simulated: Simulated, algorithm: str) -> None:
    """If nobody drops out and no deadline passes, devices change no bit and no byte."""
    lognormal = {"distribution": "lognormal", "median": 50, "sigma": 1}
    system = {"speed": lognormal, "down": lognormal, "up": lognormal, "latency_s": lognormal}
    evaluation = {"clients_every": 2, "clients_deadline_s": 1e6}
    sections = {"algorithm": {"name": algorithm}, "round": {"deadline_s": 1e6}, "evaluation": evaluation}
    task = {"options": {"part": 0.2}}
    found = []
    for simulation in ({}, {"system": system}):
        with simulated(**sections, task=task, simulation=simulation) as it:
            found.append(list(it.rounds()))
    without, timed = found
    assert [one.simulated_s for one in without] == [None] * 3
    assert all(one.simulated_s > 0 for one in timed if one.simulated_s is not None)
    same: dict[str, Any] = {"seconds": 0.0, "simulated_s": None, "simulated_total_s": None}
    assert [replace(one, **same) for one in without] == [replace(one, **same) for one in timed]


def test_the_fastest_count(run: Run, four: dict[str, Any]) -> None:
    """With close = "goal" these are c1 after 7 s and c3 after 10 s; all four download, two upload."""
    rounds = run(four, round=GOAL)
    assert [done.accepted for done in rounds] == [("c1", "c3")] * 3
    assert times(rounds) == [10] * 3
    assert rounds[-1].simulated_total_s == pytest.approx(30)
    assert {(done.bytes_down, done.bytes_up) for done in rounds} == {(4 * MODEL, 2 * MODEL)}


def test_the_bytes_of_a_late_client_count_as_far_as_they_came(run: Run, four: dict[str, Any], tmp_path: Path) -> None:
    """c2 uploads from second 9 to second 11; the round ends in the middle of it."""
    (tmp_path / "devices.csv").write_text(f"client,speed\nc0,1\nc1,10\nc2,{30 / 7}\nc3,5\n")
    first = run(four, round=GOAL, stop={"rounds": 1})[0]
    assert (first.accepted, first.bytes_up) == (("c1", "c3"), 2 * MODEL + MODEL // 2)


def test_a_deadline_closes_a_round_with_a_quorum(run: Run, four: dict[str, Any]) -> None:
    """After 12 s two of four clients have delivered, which is enough for a quorum of two."""
    rounds = run(four, round={"clients_per_round": 4, "quorum": 2, "deadline_s": 12})
    assert [(done.accepted, done.attempts) for done in rounds] == [(("c1", "c3"), 1)] * 3
    assert times(rounds) == [12] * 3
    late = "of 4 updates: 2 cancelled; 2 of them: the deadline passed"
    assert [done.why_short for done in rounds] == [f"round {number} has 2 {late}" for number in range(3)]


def test_a_deadline_without_a_quorum_begins_another_attempt(run: Run, four: dict[str, Any]) -> None:
    """With a quorum of three the second attempt, until second 24, gets the third client."""
    first = run(four, round={"clients_per_round": 4, "quorum": 3, "deadline_s": 12}, stop={"rounds": 1})[0]
    assert (first.accepted, first.attempts) == (("c1", "c2", "c3"), 2)
    assert first.simulated_s == pytest.approx(24)


@pytest.mark.slow
def test_the_drop_out_rate_of_a_run(run: Run) -> None:
    """Of the assignments of 100 rounds a share of 0.3 is dropped, to 20 %."""
    system = {"speed": 10, "drop_out": 0.3}
    simulation = {"clients": 12}
    rounds = run(system, round={"clients_per_round": 4}, stop={"rounds": 100}, simulation=simulation)
    dropped, accepted = sum(done.dropped for done in rounds), sum(len(done.accepted) for done in rounds)
    assert dropped / (dropped + accepted) == pytest.approx(0.3, rel=0.2)


def test_clients_that_drop_out_are_drawn_again(run: Run) -> None:
    """If all four drop out nobody is left: after the coordinator's wait they are drawn again, until two deliver."""
    system = {"speed": 10, "drop_out": 0.9}
    rounds = run(system, round={"clients_per_round": 4, "quorum": 2})
    assert len(rounds) == 3
    assert min(done.attempts for done in rounds) > 1
    assert max(done.simulated_s or 0 for done in rounds) > RETRY_S
    assert all(" lost; " in done.why_short and done.why_short.endswith("its device went away") for done in rounds)


def test_a_client_that_fails_is_not_tried_for_ever(simulated: Simulated) -> None:
    """Its work would fail again, so the run fails, as without simulated time."""
    local = {"learning_rate": 3e38, "weight_decay": 10.0}
    with simulated(local=local, simulation={"system": {"speed": 10, "drop_out": 0.5}}) as simulation:
        assert list(simulation.rounds()) == []
        assert (ending(simulation)[0], simulation.diverged) == ("failed", True)


@pytest.fixture
def intervals(tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """Devices that need 3 s for a round and are there in these intervals."""

    def make(lines: str) -> dict[str, Any]:
        path = tmp_path / "intervals.csv"
        path.write_text(f"client,begin_s,end_s\n{lines}")
        return {"speed": 10, "availability": {"file": str(path)}}

    return make


def test_only_clients_that_are_there_are_drawn(run: Run, intervals: Callable[[str], dict[str, Any]]) -> None:
    """The run waits for its second client until second 50; c2 and c3 come after its end."""
    rounds = run(intervals("c0,0,1000\nc1,50,1000\nc2,500,600\nc3,500,600\n"))
    assert [done.accepted for done in rounds] == [("c0", "c1")] * 3
    assert times(rounds) == [53, 3, 3]


def test_a_client_that_leaves_is_replaced(run: Run, intervals: Callable[[str], dict[str, Any]]) -> None:
    """c0 leaves after 1 s and nobody else is there; c1 and c2 come at second 20, and one of them replaces it."""
    system = intervals("c0,0,1\nc1,20,1000\nc2,20,1000\nc3,0,1000\n")
    first = run(system, round={"quorum": 2}, stop={"rounds": 1})[0]
    assert (first.dropped, first.attempts) == (1, 2)
    assert first.simulated_s == pytest.approx(23)
    assert set(first.accepted) < {"c1", "c2", "c3"}


def test_a_run_whose_clients_are_gone_fails(simulated: Simulated, intervals: Callable[[str], dict[str, Any]]) -> None:
    """Nobody comes back after second 10: three rounds fit in, and the reason has the time."""
    system = intervals("".join(f"c{index},0,10\n" for index in range(4)))
    with simulated(simulation={"system": system}, stop={"rounds": 9}) as simulation:
        assert len(list(simulation.rounds())) == 3
        assert ending(simulation)[0] == "failed"
        assert "after 10 s of simulated time, too few clients are available, 0 of 4" in ending(simulation)[1]


def test_the_time_limit_is_simulated(simulated: Simulated, four: dict[str, Any]) -> None:
    """Rounds of 10 s: the third one is not over when the 25 s of the run are."""
    with simulated(simulation={"system": four}, round=GOAL, stop={"wall_time_s": 25}) as simulation:
        assert len(list(simulation.rounds())) == 2
        assert ending(simulation) == ("completed", "its 25 s are over")


def test_what_the_server_and_evaluating_clients_need(run: Run) -> None:
    """Rounds of 3 s of training and 1 s of the server. The run waits for the last evaluation, 6 of 30 examples.

    Evaluations before the last one delay their clients: the second round begins with one.
    """
    options = {"options": {"part": 0.2}}
    system, sections = {"speed": 8, "server_s": 1}, {"task": options, "round": {"clients_per_round": 4}}
    assert times(run(system, **sections)) == [4, 4, 4]
    assert times(run(system, **sections, evaluation={"clients_every": 1})) == [4, 4.75, 4.75 + 0.75]


@pytest.mark.parametrize(
    ("algorithm", "local", "gradients"),
    [
        pytest.param("fedavg", {"epochs": 3}, 3 * EXAMPLES, id="epochs"),
        pytest.param("fedavg", {"steps": 5}, EXAMPLES + 8, id="steps"),
        pytest.param("fedsam", {}, 2 * EXAMPLES, id="two-gradients"),
        pytest.param("mimelite", {}, 2 * EXAMPLES, id="a-pass-before"),
        pytest.param("mime", {}, EXAMPLES + 2 * EXAMPLES, id="two-exchanges-and-two-gradients"),
    ],
)
def test_the_amount_of_work(run: Run, algorithm: str, local: dict[str, Any], gradients: int) -> None:
    """At one example a second: batches of 8 of 30 examples, one gradient of each unless the method needs two."""
    rounds = run({"speed": 1}, algorithm={"name": algorithm}, local=local)
    assert times(rounds) == [gradients] * 3


def test_the_same_run_has_the_same_times(run: Run) -> None:
    """Everything at once: devices, drop-outs, availability, over-selection. Another seed gives other times."""
    lognormal = {"distribution": "lognormal", "median": 20, "sigma": 1}
    system = {"speed": lognormal, "down": lognormal, "drop_out": 0.2, "availability": {"on_s": 60, "off_s": 20}}
    sections = {
        "round": {"close": "goal", "clients_per_round": 3},
        "simulation": {"clients": 12},
        "stop": {"rounds": 9},
    }

    def facts(seed: int) -> list[RoundResult]:
        return [replace(done, seconds=0.0) for done in run(system, **sections, seed=seed)]

    first = facts(0)
    assert first == facts(0)
    assert times(first) != times(facts(1))


def test_the_files_and_lines_have_the_times(run: Run, four: dict[str, Any], tmp_path: Path) -> None:
    """Columns and text for simulated time, only in runs that have it."""
    timed, without = run(four, round=GOAL), run(None)
    write_rounds(tmp_path, timed)
    rows = list(csv.DictReader((tmp_path / "rounds.csv").read_text().splitlines()))
    assert [(float(row["simulated_s"]), float(row["simulated_total_s"])) for row in rows] == [
        (10, 10),
        (10, 20),
        (10, 30),
    ]
    assert round_line(timed[1]).endswith(" up, 10.0 s simulated, 20.0 s in all")
    write_rounds(tmp_path, without)
    assert "simulated" not in (tmp_path / "rounds.csv").read_text() + round_line(without[1])
