"""The missing cells of a plan: order, resumption, and identity of a cell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fl_ops.compare.cells import Cell, CellFolder, CellResult
from fl_ops.compare.plan import Plan
from fl_ops.compare.report import tables
from fl_ops.errors import UsageError
from fl_server.run_settings.spec import from_values
from tests.fl_ops.compare.conftest import Reached, Read


@pytest.fixture
def folder(tmp_path: Path) -> CellFolder:
    """Where finished cells are."""
    (tmp_path / "cells").mkdir()
    return CellFolder(tmp_path / "cells")


def run(plan: Plan, folder: CellFolder, result: CellResult, limit: int = 100) -> list[Cell]:
    """The cells of a plan, one after the other, all with the same result; at most so many."""
    done: list[Cell] = []
    while (missing := plan.missing()) and len(done) < limit:
        folder.save(missing[0], result)
        done.append(missing[0])
    return done


def test_tuning_comes_first_then_seed_by_seed(read: Read, folder: CellFolder, reached: Reached) -> None:
    """3 and 6 cells of the search under its own seed; then both methods with seed 1 before any with seed 2."""
    done = run(Plan(read(), folder.load), folder, reached(0.5))
    assert [cell.stage for cell in done] == ["tuning"] * 9 + ["final"] * 4
    assert [cell.seed for cell in done] == [9] * 9 + [1, 1, 2, 2]


def test_tuning_uses_withheld_training_data_only(read: Read, folder: CellFolder, reached: Reached) -> None:
    """The final runs use the test set, all training data and all rounds."""
    cells = run(Plan(read(), folder.load), folder, reached(0.5))
    settings = {
        (c.stage, c.settings["simulation"]["validation_every"], c.settings["run"]["stop"]["rounds"]) for c in cells
    }
    assert settings == {("tuning", 6, 2), ("final", 0, 3)}


def test_a_comparison_goes_on_where_it_was(read: Read, folder: CellFolder, reached: Reached) -> None:
    """Five cells are done; a new plan over the same files wants the eight others, and nothing twice."""
    first = run(Plan(read(), folder.load), folder, reached(0.5), limit=5)
    rest = run(Plan(read(), folder.load), folder, reached(0.5))
    assert len({cell.digest for cell in [*first, *rest]}) == len(first) + len(rest) == 13


@pytest.mark.parametrize(
    ("old", "new", "again"),
    [
        ("stop = { rounds = 3 }", "stop = { rounds = 4 }", 4),
        ("seeds = [1, 2]", "seeds = [1, 3]", 2),
        ("alpha = [0.1, 0.3]", "alpha = [0.1, 0.4]", 3),
        ('name = "digits"', 'name = "digits", options = { client_eval_fraction = 0.2 }', 13),
        ('name = "fedavg"', 'name = "fedavg"\nschedules = { eta_g = { kind = "linear", end = 0.1 } }', 5),
        ('label = "FedCM"', 'label = "FedCM, ours"', 0),
        ('name = "digits"', 'name = "digits", options = { data_root = "elsewhere" }', 0),
        ("target = 0.5", "target = 0.6", 0),
    ],
)
def test_a_changed_setting_is_another_cell_and_a_changed_label_is_not(
    read: Read, folder: CellFolder, reached: Reached, old: str, new: str, again: int
) -> None:
    """Only cells that the change affects run again: final runs, one seed, one alpha's search, all, or none."""
    run(Plan(read(), folder.load), folder, reached(0.5))
    assert len(run(Plan(read((old, new)), folder.load), folder, reached(0.5))) == again


def test_what_is_left_is_counted(read: Read, folder: CellFolder, reached: Reached) -> None:
    """After two cells of the search: 7 more with 2 rounds, and 4 final ones with 3 rounds."""
    plan = Plan(read(), folder.load)
    run(plan, folder, reached(0.5), limit=2)
    assert (plan.done(), plan.left()) == (2, (11, 7 * 2 + 4 * 3))


def test_without_tuning_the_first_setting_is_judged_at_once(read: Read, folder: CellFolder, reached: Reached) -> None:
    """The run's own rate, for both seeds of both methods."""
    table = read(
        ("tuning = { seed = 9, learning_rates = [0.1, 0.2, 0.4], rounds = 2, extend = 0 }", ""),
        ("tune = { alpha = [0.1, 0.3] }", ""),
    )
    cells = run(Plan(table, folder.load), folder, reached(0.5))
    assert [(cell.label, cell.seed) for cell in cells] == [("FedAvg", 1), ("FedCM", 1), ("FedAvg", 2), ("FedCM", 2)]


def test_only_some_methods(read: Read, folder: CellFolder, reached: Reached) -> None:
    """Their cells are those of the whole comparison."""
    done = run(Plan(read(), folder.load, ["FedAvg"]), folder, reached(0.5))
    assert ({cell.label for cell in done}, len(done)) == ({"FedAvg"}, 5)


def test_an_unknown_method_is_refused(read: Read, folder: CellFolder) -> None:
    """The message has the known labels."""
    with pytest.raises(UsageError, match="FedAvg, FedCM; got fedcm"):
        Plan(read(), folder.load, ["fedcm"])


def test_a_file_gives_back_what_it_was_given(read: Read, folder: CellFolder, reached: Reached) -> None:
    """All of a result, also the round in which it diverged."""
    cell, result = Plan(read(), folder.load).missing()[0], reached(0.25, 0.5, diverged=2)
    folder.save(cell, result)
    assert folder.load(cell) == result


def test_a_cell_has_its_schedules(read: Read, folder: CellFolder) -> None:
    """Its settings are those of a run with these schedules; other methods have none."""
    scheduled = 'name = "fedavg"\nschedules = { eta_g = { kind = "step", milestones = [2], factor = 0.1 } }'
    first = Plan(read(('name = "fedavg"', scheduled)), folder.load).missing()[0]
    run = from_values(dict(first.settings["run"]))
    assert run.algorithm.schedules["eta_g"].milestones == (2,)
    assert "schedules" not in Plan(read(), folder.load).missing()[0].settings["run"]["algorithm"]


def test_a_method_has_its_own_options_of_the_task(read: Read, folder: CellFolder, reached: Reached) -> None:
    """They are in its cells and its row, so that two rows with and without augmentation differ."""
    options = 'name = "fedavg"\noptions = { client_eval_fraction = 0.25 }'
    plan = Plan(read(('name = "fedavg"', options)), folder.load)
    given = {cell.label: cell.settings["run"]["task"]["options"] for cell in plan.missing()}
    assert given == {"FedAvg": {"client_eval_fraction": 0.25}, "FedCM": {}}
    done = Plan(plan.table, lambda cell: reached(0.5))
    assert "| client_eval_fraction 0.25 |" in tables(done)


JUDGED = ("rounds = 2, extend = 0", "rounds = 2, extend = 1, judge_seeds = [7, 8], near = 0.05")


def accuracy(cell: Cell) -> float:
    """The rate 0.1 is the best in short runs, 0.05 in long ones."""
    rate = cell.settings["run"]["local"]["learning_rate"]
    return {0.1: 0.6, 0.05: 0.58}.get(rate, 0.3) + (0.1 if cell.stage == "judging" and rate == 0.05 else 0.0)


def test_judged_runs_have_all_rounds_and_withheld_data(read: Read, folder: CellFolder, reached: Reached) -> None:
    """Three rates, one beyond the edge, two judged under two seeds, then the final runs of the chosen one."""
    plan, done = Plan(read(JUDGED), folder.load, ["FedAvg"]), list[Cell]()
    while missing := plan.missing():
        folder.save(missing[0], reached(accuracy(missing[0])))
        done.append(missing[0])
    assert [cell.stage for cell in done] == ["tuning"] * 4 + ["judging"] * 4 + ["final"] * 2
    judged = [cell for cell in done if cell.stage == "judging"]
    assert {cell.settings["run"]["stop"]["rounds"] for cell in judged} == {3}
    assert {cell.settings["simulation"]["validation_every"] for cell in judged} == {6}
    assert sorted(cell.seed for cell in judged) == [7, 7, 8, 8]
    assert done[-1].settings["run"]["local"]["learning_rate"] == 0.05


def test_the_search_depends_on_the_files_alone(read: Read, folder: CellFolder, reached: Reached) -> None:
    """A new plan after every cell, and cells finished in another order, lead to the same cells."""
    done: list[set[str]] = []
    for take in (0, -1):
        (folder.path / str(take)).mkdir()
        mine, digests = CellFolder(folder.path / str(take)), set[str]()
        while missing := Plan(read(JUDGED), mine.load).missing():
            mine.save(missing[take], reached(accuracy(missing[take])))
            digests.add(missing[take].digest)
        done.append(digests)
    assert done[0] == done[1]


def test_of_equally_urgent_cells_the_longest_is_first(read: Read, folder: CellFolder, reached: Reached) -> None:
    """FedCM takes longer: its cells of the search come first, then its final cell of each seed."""
    plan = Plan(read(), folder.load)
    seconds = {"FedAvg": 1.0, "FedCM": 2.0}
    done: list[Cell] = []
    while missing := plan.missing(lambda cell: seconds[cell.label]):
        folder.save(missing[0], reached(0.5))
        done.append(missing[0])
    assert [cell.label for cell in done] == ["FedCM"] * 6 + ["FedAvg"] * 3 + ["FedCM", "FedAvg"] * 2


def test_what_is_left_of_a_judged_search_is_an_estimate(read: Read, folder: CellFolder) -> None:
    """Of FedAvg: 3 short runs of 2 rounds, two settings under two seeds and two final runs of 3 rounds."""
    assert Plan(read(JUDGED), folder.load, ["FedAvg"]).left() == (3 + 4 + 2, 3 * 2 + 6 * 3)


def test_settings_with_their_default_values_are_not_in_the_name_of_a_cell(read: Read, folder: CellFolder) -> None:
    """A setting that is added later renames no finished cell, and neither does the size of batches in evaluations."""
    (cell, *_) = Plan(read(), folder.load).missing()
    run = cell.settings["run"]
    earlier = {key: value for key, value in run["round"].items() if key != "max_client_share"}
    before = replace(
        cell,
        settings={
            **cell.settings,
            "run": {**run, "round": earlier, "evaluation": {**run["evaluation"], "batch_size": 512}},
        },
    )
    assert before.settings != cell.settings
    assert before.digest == cell.digest
    others: list[dict[str, Any]] = [
        {"round": {**run["round"], "max_client_share": 0.5}},
        {"evaluation": {"every": 7}},
        {"seed": 77},
    ]
    changed = [replace(cell, settings={**cell.settings, "run": {**run, **other}}) for other in others]
    assert len({variant.digest for variant in [cell, *changed]}) == 4
    sized = replace(cell, settings={**cell.settings, "simulation": {**cell.settings["simulation"], "clients": 3}})
    assert sized.digest != cell.digest


def test_a_new_key_of_an_optional_section_does_not_rename_its_cells(read: Read, folder: CellFolder) -> None:
    """Its default does not; another value makes another cell."""
    (cell, *_) = Plan(read(), folder.load).missing()

    def averaged(**section: Any) -> Cell:
        run = {**cell.settings["run"], "averaging": {"method": "ema", "decay": 0.9, **section}}
        return replace(cell, settings={**cell.settings, "run": run})

    assert averaged(start=None, window=None, statistics="averaged").digest == averaged().digest
    others = [cell, averaged(), averaged(statistics="estimated"), averaged(decay=0.5)]
    assert len({other.digest for other in others}) == 4


def test_the_cohort_of_a_method_may_be_its_own(read: Read) -> None:
    """A sweep over the size of a cohort is rows of one table: the runs of a row alone have its keys of [round]."""
    plan = Plan(read(("tune = { alpha = [0.1, 0.3] }", "round = { clients_per_round = 3 }")), lambda cell: None)
    sizes = {(cell.label, cell.settings["run"]["round"]["clients_per_round"]) for cell in plan.missing()}
    assert sizes == {("FedAvg", 2), ("FedCM", 3)}


def test_a_method_may_have_a_buffer(read: Read) -> None:
    """Beside rows with cohorts, whose keys of [round] its runs do not have."""
    with_cohorts = ("stop = { rounds = 3 }", "stop = { rounds = 3 }\nround = { clients_per_round = 4, quorum = 4 }")
    buffered = ("tune = { alpha = [0.1, 0.3] }", 'round = { close = "buffer", goal = 3 }')
    plan = Plan(read(with_cohorts, buffered), lambda cell: None)
    rounds = {cell.label: cell.settings["run"]["round"] for cell in plan.missing()}
    assert (rounds["FedAvg"]["quorum"], rounds["FedAvg"]["goal"]) == (4, None)
    assert (rounds["FedCM"]["quorum"], rounds["FedCM"]["goal"], rounds["FedCM"]["max_staleness"]) == (None, 3, 20)


def test_a_method_may_have_privacy_of_its_own(read: Read) -> None:
    """Its runs have no limits that depend on other clients; the other methods' runs keep theirs."""
    section = 'privacy = { unit = "client", noise_multiplier = 1.0, clip = 0.1, delta = 1e-4, max_epsilon = 9.0 }'
    plan = Plan(read(("tune = { alpha = [0.1, 0.3] }", section)), lambda cell: None)
    runs = {cell.label: cell.settings["run"] for cell in plan.missing()}
    limits = {label: run["round"]["max_relative_norm"] for label, run in runs.items()}
    assert limits == {"FedAvg": 100.0, "FedCM": 0.0}
    assert runs["FedCM"]["privacy"]["clip"] == 0.1
    assert runs["FedAvg"].get("privacy") is None
