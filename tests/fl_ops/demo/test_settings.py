"""Which settings the demo uses, and the grid that they come from."""

from __future__ import annotations

import pytest

from benchmarks import demo_grid
from fl_ops.demo.settings import DemoSettings, at_edge, differences, read_grid
from protos.run_file import parse_run


@pytest.mark.parametrize("algorithm", ["fedavg", "fedcm"])
def test_the_choice_follows_the_rule(algorithm: str) -> None:
    """The highest mean of the averaged models of its own cells, and it is what a demo of digits runs with."""
    own = [cell for cell in read_grid()["cells"] if cell["algorithm"] == algorithm]
    best = max(own, key=lambda cell: cell["averaged"]["mean"])
    method = DemoSettings().method(algorithm)
    assert {key: getattr(method, key) for key in demo_grid.CELL} == {key: best[key] for key in demo_grid.CELL}
    assert method.source == "best of its grid"


def test_every_algorithm_was_given_as_many_cells() -> None:
    """The cells in the file are those of the search, and each algorithm has the same number of different ones."""
    cells = demo_grid.cells()
    in_file = [{key: cell[key] for key in demo_grid.CELL} for cell in read_grid()["cells"]]
    assert in_file == [{key: getattr(cell, key) for key in demo_grid.CELL} for own in cells.values() for cell in own]
    assert cells.keys() == {"fedavg", "fedcm"}
    assert {len(set(map(str, own))) for own in cells.values()} == {60}


def test_the_decay_is_the_best_of_those_tried_and_the_same_for_all() -> None:
    """Chosen by validation accuracy, and every run has it."""
    grid = read_grid()
    best = max(grid["decays"], key=lambda one: one["mean"])
    runs = [DemoSettings().run(DemoSettings().method(name)) for name in ("fedavg", "fedcm")]
    assert [run["averaging"] for run in runs] == [{"method": "ema", "decay": best["decay"]}] * 2


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
    assert (setup["clients_per_round"], setup["steps"]) == (run.round.clients_per_round, run.local.steps)
    assert setup["batch_size"] == run.local.batch_size
    for cell in grid["cells"]:
        for model in (cell["averaged"], cell["latest"]):
            assert model["mean"] == pytest.approx(sum(model["mean_by_seed"]) / len(grid["seeds"]), abs=1e-4)


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


def of_models(averaged: list[float], latest: list[float]) -> dict[str, dict[str, list[float]]]:
    """The check of a cell."""
    return {"averaged": {"mean_by_seed": averaged}, "latest": {"mean_by_seed": latest}}


GRID = {
    "cells": [
        {"algorithm": name, "learning_rate": rate, "parameters": {"alpha": alpha}, "max_gradient_norm": norm}
        for name in ("a", "b", "c")
        for rate in (0.1, 0.2, 0.4)
        for alpha in (0.1, 0.3, 0.5)
        for norm in (0.0, 1.0, 2.0)
    ],
    "choice": {
        "a": {"learning_rate": 0.2, "parameters": {"alpha": 0.3}, "max_gradient_norm": 1.0},
        "b": {"learning_rate": 0.4, "parameters": {"alpha": 0.3}, "max_gradient_norm": 1.0},
        "c": {"learning_rate": 0.2, "parameters": {"alpha": 0.5}, "max_gradient_norm": 1.0},
    },
    "check": {
        "cells": [
            {"algorithm": "a", **of_models([0.75, 0.5, 0.5], [0.5, 0.25, 0.5])},
            {"algorithm": "b", **of_models([0.5, 0.75, 0.5], [0.5, 0.5, 0.0])},
        ]
    },
}


def test_a_difference_is_taken_seed_by_seed() -> None:
    """0.75 - 0.5, 0.5 - 0.75, 0: on average 0, above zero once; the latest models apart."""
    difference = differences(GRID, "a", "b")
    assert (difference["averaged"].means, difference["latest"].means) == ((0.25, -0.25, 0.0), (0.0, -0.25, 0.5))
    assert (difference["averaged"].average, difference["averaged"].wins) == (0.0, 1)
    assert difference["averaged"].standard_error == pytest.approx(0.25 / 3**0.5)
    assert differences(GRID, "a", "c") == {}


def test_a_choice_at_the_edge_is_seen() -> None:
    """0.4 is the highest rate that was tried, 0.5 the highest alpha."""
    assert [at_edge(GRID, name) for name in ("a", "b", "c")] == [False, True, True]
