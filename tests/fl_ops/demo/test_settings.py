"""Which settings the demo uses, and the grid that they come from."""

from __future__ import annotations

import pytest

from benchmarks import demo_grid
from fl_ops.demo.settings import DemoSettings, at_edge, difference, read_grid
from protos.run_file import parse_run


@pytest.mark.parametrize("algorithm", ["fedavg", "fedcm"])
def test_the_choice_follows_the_rule(algorithm: str) -> None:
    """The highest mean of its own cells, and it is what a demo of digits runs with."""
    best = max((cell for cell in read_grid()["cells"] if cell["algorithm"] == algorithm), key=lambda cell: cell["mean"])
    method = DemoSettings().method(algorithm)
    assert (method.learning_rate, method.parameters) == (best["learning_rate"], best["parameters"])
    assert method.source == "best of its grid"


def test_no_algorithm_was_given_other_rates() -> None:
    """One grid of rates, each tried with each value of an algorithm's own parameters."""
    by_algorithm: dict[tuple[str, str], list[float]] = {}
    for cell in read_grid()["cells"]:
        by_algorithm.setdefault((cell["algorithm"], str(cell["parameters"])), []).append(cell["learning_rate"])
    assert set(map(tuple, by_algorithm.values())) == {demo_grid.LEARNING_RATES}
    assert {algorithm for algorithm, _ in by_algorithm} == {"fedavg", "fedcm"}


def test_seeds_of_search_check_and_demo_are_different_ones() -> None:
    """A choice must be checked on other seeds."""
    grid = read_grid()
    seeds = [*grid["seeds"], *grid["check"]["seeds"], DemoSettings().seed]
    assert len(set(seeds)) == len(seeds)
    assert len(grid["seeds"]) >= 4


def test_the_grid_was_made_for_the_demo_as_it_is() -> None:
    """Same clients, rounds and local work; each mean is that of its seeds, to the digits that are kept."""
    grid, settings = read_grid(), DemoSettings()
    run = parse_run(settings.run(settings.method("fedcm")))
    setup = grid["setup"]
    assert (setup["clients"], setup["rounds"]) == (run.round.min_clients, run.stop.rounds)
    assert (setup["clients_per_round"], setup["epochs"]) == (run.round.clients_per_round, run.local.epochs)
    assert setup["batch_size"] == run.local.batch_size
    for cell in grid["cells"]:
        assert cell["mean"] == pytest.approx(sum(cell["mean_by_seed"]) / len(grid["seeds"]), abs=1e-4)


def test_another_task_has_defaults() -> None:
    """The grid search does not cover it, as its source states."""
    method = DemoSettings(task="my_task:Wine").method("fedcm")
    assert (method.learning_rate, method.parameters, method.source) == (0.1, {}, "default, not tuned")


def test_a_rate_that_was_asked_for_is_used() -> None:
    """For every algorithm; FedCM keeps its alpha."""
    settings = DemoSettings(learning_rate=0.7)
    assert {settings.method(name).learning_rate for name in ("fedavg", "fedcm")} == {0.7}
    assert "alpha" in settings.method("fedcm").parameters


def test_one_client_trains_alone() -> None:
    """Two of one cannot be drawn."""
    assert DemoSettings(clients=1).clients_per_round == 1


GRID = {
    "cells": [{"learning_rate": rate} for rate in (0.1, 0.2, 0.4)],
    "choice": {"a": {"learning_rate": 0.2}, "b": {"learning_rate": 0.4}},
    "check": {
        "cells": [
            {"algorithm": "a", "mean_by_seed": [0.75, 0.5, 0.5], "worst_by_seed": [0.5, 0.25, 0.5]},
            {"algorithm": "b", "mean_by_seed": [0.5, 0.75, 0.5], "worst_by_seed": [0.5, 0.5, 0.0]},
        ]
    },
}


def test_a_difference_is_taken_seed_by_seed() -> None:
    """0.75 - 0.5, 0.5 - 0.75, 0: on average 0, above zero once."""
    found = difference(GRID, "a", "b")
    assert found is not None
    assert (found.means, found.worst) == ((0.25, -0.25, 0.0), (0.0, -0.25, 0.5))
    assert (found.average, found.wins) == (0.0, 1)
    assert difference(GRID, "a", "c") is None


def test_a_choice_at_the_edge_is_seen() -> None:
    """0.4 is the last rate that was tried."""
    assert (at_edge(GRID, "a"), at_edge(GRID, "b")) == (False, True)
