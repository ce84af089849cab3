"""Means, deviations and costs, compared with hand-computed values, and their files."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from fl_ops.compare import report, results
from fl_ops.compare.cells import Cell, CellResult, Choice, RoundRow
from fl_ops.compare.plan import Plan
from fl_ops.compare.results import Axis
from fl_ops.compare.summary import Spread, rows
from fl_ops.errors import UsageError
from fl_ops.simulate.engine_choice import EngineRequest
from tests.fl_ops.compare.conftest import Reached, Read


@pytest.fixture
def plan(read: Read, reached: Reached) -> Plan:
    """FedAvg reaches 0.4 and 0.6 under its two seeds, FedCM 0.7 and 0.9; alpha 0.3 and rate 0.2 are best.

    Each run has three rounds of half, then two of the whole accuracy.
    """

    def load(cell: Cell) -> CellResult:
        run = cell.settings["run"]
        rate, alpha = run["local"]["learning_rate"], run["algorithm"]["parameters"].get("alpha", 0.3)
        if cell.stage == "tuning":
            return (
                reached(0.5, 0.5, diverged=None if rate < 0.4 else 1)
                if alpha == 0.3 and rate > 0.1
                else reached(0.2, 0.2)
            )
        top = {"FedAvg": 0.2, "FedCM": 0.5}[cell.label] + 0.2 * cell.seed
        return reached(top / 2, top / 2, top / 2, top, top)

    return Plan(read(), load)


def test_mean_and_sample_deviation_over_the_seeds(plan: Plan) -> None:
    """0.4 and 0.6: mean 0.5, deviation sqrt(0.01 + 0.01) = 0.1414; last, final and best are the same here."""
    row = rows(plan)[0]
    for spread in (row.final, row.last, row.best):
        assert spread is not None
        assert (spread.mean, spread.deviation) == pytest.approx((0.5, math.sqrt(0.02)))


def test_costs_to_the_target_are_those_of_the_seeds_that_reached_it(plan: Plan) -> None:
    """FedAvg passes 0.5 under seed 2 alone, in its fourth round: 4 x 2 MB down, 4 x 1 MB up; in all 5 rounds.

    A round takes 10 s of simulated time.
    """
    row = rows(plan)[0]
    assert row.time_to_target == Spread(40, None, 1)
    assert row.rounds_to_target == Spread(4, None, 1)
    assert (row.down_to_target, row.up_to_target, row.down) == (
        Spread(8, None, 1),
        Spread(4, None, 1),
        Spread(10, 0, 2),
    )


@pytest.mark.parametrize(
    ("local", "decays"),
    [
        ("weight_decay = 0.001", [0.001, 0.001]),
        ("", [0.0, 0.0]),
    ],
    ids=["inside the mix", "none"],
)
def test_rows_with_one_decay_are_comparable(read: Read, reached: Reached, local: str, decays: list[float]) -> None:
    """With the paper's order every method has the run's decay: a sentence names it, and no column does."""
    plan = Plan(
        read(("learning_rate = 0.1 }", f"learning_rate = 0.1{', ' * bool(local)}{local} }}")), lambda cell: reached(0.5)
    )
    assert [row.effective_decay for row in rows(plan)] == decays
    text = report.tables(plan)
    assert (report.DECAYS_DIFFER in text, "| effective decay |" in text) == (False, False)
    assert ("Every row: effective weight decay 0.001" in text) == (0.001 in decays)


def test_a_decay_outside_of_the_mix_is_named(read: Read, reached: Reached) -> None:
    """FedCM with alpha = 0.1 has ten times FedAvg's decay then, and the table says so."""
    order = 'parameters = { order = "feddyn_code" }'
    table = read(
        ("learning_rate = 0.1 }", "learning_rate = 0.1, weight_decay = 0.001 }"),
        ('name = "fedavg"', f'name = "fedavg"\n{order}'),
        ('name = "fedcm"', f'name = "fedcm"\n{order}'),
        ("alpha = [0.1, 0.3]", "alpha = [0.1]"),
    )
    plan = Plan(table, lambda cell: reached(0.5))
    assert [row.effective_decay for row in rows(plan)] == pytest.approx([0.001, 0.01])
    text = report.tables(plan)
    assert (report.DECAYS_DIFFER in text, "| FedCM | 0.1 (edge) | 0.01 |" in text) == (True, True)


def test_no_rank_inside_the_deviations(plan: Plan) -> None:
    """FedCM leads by 0.3, both deviations are 0.1414, pooled 0.1414: FedAvg is not among the best."""
    assert [row.among_best for row in rows(plan)] == [False, True]


def test_within_one_pooled_deviation_both_are_among_the_best(read: Read, reached: Reached) -> None:
    """0.5 +- 0.1414 and 0.6 +- 0.1414: they differ by less than 0.1414."""
    tops = {"FedAvg": 0.2, "FedCM": 0.3}
    plan = Plan(read(), lambda cell: reached(tops[cell.label] + 0.2 * min(cell.seed, 2)))
    assert [row.among_best for row in rows(plan)] == [True, True]


def test_a_diverged_seed_is_reported_and_left_out(read: Read, reached: Reached) -> None:
    """FedAvg's second seed diverges: mean of the other one, no deviation, not among the best."""
    plan = Plan(read(), lambda cell: reached(0.8, diverged=1 if (cell.label, cell.seed) == ("FedAvg", 2) else None))
    row = rows(plan)[0]
    assert (row.diverged, row.last, row.among_best) == ((2,), Spread(0.8, None, 1), False)


def test_the_choice_and_whether_it_is_at_an_edge(plan: Plan) -> None:
    """FedCM's best is 0.2 between 0.1 and 0.4; 0.4 diverged."""
    row = rows(plan)[1]
    assert (row.choice, row.at_edge) == (Choice(0.2, {"alpha": 0.3}), False)


def test_an_unfinished_comparison_has_rows_without_numbers(read: Read) -> None:
    """Nothing is run yet: no choice, no seeds."""
    row = rows(Plan(read(), lambda cell: None))[0]
    assert (row.choice, row.seeds, row.last) == (None, (), None)


def test_the_rounds_file_has_a_line_for_each_round(plan: Plan) -> None:
    """9 cells of the search with 2 rounds, 4 final ones with 5."""
    lines = list(csv.DictReader(io.StringIO(results.results_csv(plan))))
    assert len(lines) == 9 * 2 + 4 * 5
    assert (
        lines[-1] | {"method": "FedCM", "seed": "2", "round": "4", "accuracy": "0.9", "parameters": "alpha 0.3"}
        == lines[-1]
    )


def test_the_summary_file_has_a_line_for_each_method_and_split(plan: Plan) -> None:
    """Mean and deviation in columns of their own."""
    lines = list(csv.DictReader(io.StringIO(results.summary_csv(plan))))
    assert [(line["method"], line["last_mean"], line["last_deviation"]) for line in lines] == [
        ("FedAvg", "0.5", "0.141421"), ("FedCM", "0.8", "0.141421"),
    ]  # fmt: skip


def test_the_facts_have_every_option_and_what_was_tried(plan: Plan) -> None:
    """Default options are included, such as the order of a local step; a run that diverged has no accuracy."""
    row = json.loads(results.summary_json(plan))["rows"][1]
    assert row["settings"]["run"]["algorithm"]["parameters"]["order"] == "paper"
    setting = {"learning_rate": 0.4, "parameters": {"alpha": 0.3}, "local": {}, "options": {}}
    assert {**setting, "validation": None, "judged": []} in row["tried"]


def test_a_page_gets_its_tables_between_the_marks_and_keeps_the_rest(plan: Plan) -> None:
    """Filled in twice it is the same page; the best mean is bold."""
    marks = "before\n<!-- fl compare small: begin -->\nold\n<!-- fl compare small: end -->\nafter\n"
    once = report.insert_tables(marks, plan)
    assert once == report.insert_tables(once, plan)
    assert (once.startswith("before\n"), once.endswith("\nafter\n"), "\nold\n" in once) == (True, True, False)
    assert "| FedCM | 0.2 | alpha 0.3 | **80.00 ± 14.14** |" in once
    assert ("of the search" in once, "of the search" in report.tables(plan)) == (False, True)


def test_published_accuracies_are_beside_ours(read: Read, reached: Reached) -> None:
    """A column for a paper's numbers; a method without one has a dash."""
    table = read(('name = "fedcm"', 'name = "fedcm"\npublished = { even = 0.8761 }'))
    text = report.tables(Plan(table, lambda cell: reached(0.5)))
    assert "| FedCM | 0.1 (edge) | alpha 0.1 | 87.61 | **50.00 ± 0.00** |" in text
    assert "| FedAvg | 0.1 (edge) |  | - | **50.00 ± 0.00** |" in text


def test_a_file_without_runs_has_the_papers_numbers_alone(read: Read) -> None:
    """There is no column that only runs fill."""
    table = read(('name = "fedcm"', 'name = "fedcm"\npublished = { even = 0.8761 }'), *NO_SEARCH)
    text = report.tables(Plan(table, lambda cell: None))
    assert "| Method | even |\n| --- | --- |\n| FedCM | 87.61 |" in text
    assert text.endswith("No run yet: the numbers are the published accuracies.")


def test_a_row_without_any_number_is_only_named(read: Read, reached: Reached) -> None:
    """A file of hundreds of runs has a short page before they are run: its rows are those of papers and of runs."""
    plan = Plan(read(*NO_SEARCH), lambda cell: reached(0.5) if cell.label == "FedCM" else None)
    text = report.tables(plan)
    assert ("| FedCM |" in text, "| FedAvg" in text, "Not run: FedAvg." in text) == (True, False, True)


def test_a_table_of_lockstep_names_its_precision(plan: Plan) -> None:
    """So do the device, or the GPU's model; a table of clients one at a time has no such line."""
    engine = EngineRequest("batched", precision="bfloat16").options().arithmetic
    lockstep = Plan(replace(plan.table, engine=engine), lambda cell: plan.results()[0][1])
    assert "Clients in lockstep on cpu, precision bfloat16." in report.tables(lockstep)
    assert "lockstep" not in report.tables(plan)


def test_a_page_without_marks_is_refused(plan: Plan) -> None:
    """Nothing is written into a page that did not ask for it."""
    with pytest.raises(UsageError, match="expected the lines"):
        report.insert_tables("a page", plan)


def test_the_tables_have_judged_settings_rates_beyond_the_grid_and_the_clipping(read: Read, reached: Reached) -> None:
    """Rate 0.05 is beyond the grid; 0.1 has 60 % in its short run and 70 % in its long ones, and is chosen."""

    def load(cell: Cell) -> CellResult:
        rate = cell.settings["run"]["local"]["learning_rate"]
        return reached({"tuning": 0.6 if rate == 0.1 else 0.5, "judging": 0.7, "final": 0.8}[cell.stage])

    table = read(
        ("rounds = 2, extend = 0", "rounds = 2, judge_seeds = [7, 8]"),
        ("tune = { alpha = [0.1, 0.3] }", "local = { max_gradient_norm = 1 }"),
    )
    text = report.tables(Plan(table, load))
    assert "| FedAvg |  | 50.0 | **60.0 (70.0)** | 50.0 | 50.0 |" in text
    assert "| FedCM | 0.1 | max_gradient_norm 1 |" in text
    assert "mean of the runs of 3 rounds with the seeds 7, 8" in text


def test_an_edge_is_marked_only_after_the_last_extension(read: Read, reached: Reached) -> None:
    """The lowest rate always wins: 0.1, then 0.05; with one extension allowed, 0.05 is the edge."""

    def load(cell: Cell) -> CellResult:
        return reached(1 - cell.settings["run"]["local"]["learning_rate"])

    row = rows(Plan(read(("extend = 0", "extend = 1")), load))[0]
    assert row.choice is not None
    assert (row.choice.learning_rate, row.at_edge) == (0.05, True)


@pytest.mark.parametrize("axis", ["rounds", "megabytes"])
def test_a_picture_is_drawn(plan: Plan, axis: Axis, tmp_path: Path) -> None:
    """A PNG, with a panel for each of the methods."""
    assert results.draw(plan, ("accuracy", "even"), axis, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_without_runs_there_is_no_picture(read: Read, tmp_path: Path) -> None:
    """An empty plot would suggest results."""
    assert not results.draw(Plan(read(), lambda cell: None), ("accuracy", "even"), "rounds", tmp_path / "picture.png")


def test_another_metric_goes_by_its_direction(read: Read, reached: Reached) -> None:
    """By an error the lowest mean leads, best is the lowest value, and the target is reached from above."""
    table = read(
        ("report = { target = 0.5, last = 2 }", 'report = { metric = "mae", target = 1.5, last = 2 }'),
        ("tuning = { seed = 9, learning_rates = [0.1, 0.2, 0.4], rounds = 2, extend = 0 }", ""),
        ("tune = { alpha = [0.1, 0.3] }", ""),
    )
    of = {"FedAvg": (3.0, 1.0, 2.0), "FedCM": (3.0, 2.0, 2.5)}

    def load(cell: Cell) -> CellResult:
        result = reached(0.1, 0.2, 0.3)
        values = zip(result.rounds, of[cell.label], strict=True)
        return replace(result, rounds=tuple(replace(row, metrics={"mae": value}) for row, value in values))

    plan = Plan(table, load)
    found = {row.label: row for row in rows(plan)}
    assert [found[label].best for label in of] == [Spread(1.0, 0, 2), Spread(2.0, 0, 2)]
    assert [found[label].among_best for label in of] == [True, False]
    assert [found[label].rounds_to_target for label in of] == [Spread(2, 0, 2), None]
    assert "### Test mae, even" in report.tables(plan)
    assert "**1.5 ± 0**" in report.tables(plan)


def on_clients_only(share: float) -> CellResult:
    """A run of one round that only clients evaluated."""
    metrics = {"clients_accuracy": share, "clients_accuracy_std": 0.1}
    return CellResult((RoundRow(0, 2, 1.0, None, None, 1, 1, 0.5, "", metrics=metrics),), 1.0)


def test_a_metric_that_no_run_has_is_named_with_what_to_set(read: Read) -> None:
    """Only clients evaluated: the tables of accuracy name the clients' metric, and a search ends at its first run."""
    untuned = ("tuning = { seed = 9, learning_rates = [0.1, 0.2, 0.4], rounds = 2, extend = 0 }\n", "")
    text = report.tables(Plan(read(untuned, ("tune = { alpha = [0.1, 0.3] }", "")), lambda _: on_clients_only(0.5)))
    assert "No evaluation has accuracy. Set report.metric to what the runs have: clients_accuracy." in text
    with pytest.raises(UsageError, match=r"cannot compare settings\. No evaluation has accuracy\. Set report\.metric"):
        Plan(read(), lambda _: on_clients_only(0.5)).missing()


def test_a_search_does_not_see_the_clients_test_examples(read: Read) -> None:
    """Settings are chosen by the server's accuracy on the validation examples, final runs compared by the clients'."""
    table = read(
        ("last = 2 }", 'last = 2, metric = "clients_accuracy" }\nevaluation = { every = 0, clients_every = 1 }')
    )

    def result(cell: Cell) -> CellResult:
        rate = cell.settings["run"]["local"]["learning_rate"]
        metrics = {"accuracy": rate, "clients_accuracy": 1 - rate, "clients_accuracy_std": 0.1}
        assert cell.settings["run"]["evaluation"]["every"] == (0 if cell.stage == "final" else 1)
        return CellResult((RoundRow(0, 2, 1.0, rate, None, 1, 1, 0.5, "", metrics=metrics),), 1.0)

    plan = Plan(table, result)
    row = rows(plan)[0]
    assert row.choice is not None
    assert (row.choice.learning_rate, row.last and row.last.mean) == (0.4, 0.6)
    assert "### Over clients and flatness, clients_accuracy, even" in report.tables(plan)


def test_a_metric_without_a_direction_is_refused(read: Read) -> None:
    """The message says what to write."""
    with pytest.raises(UsageError, match=r"lower_is_better = true or false with the metric 'gloss'"):
        read(("report = { target = 0.5, last = 2 }", 'report = { metric = "gloss" }'))


BASELINE = ("report = { target = 0.5, last = 2 }", 'report = { target = 0.5, last = 2, baseline = "FedAvg" }')
THREE_SEEDS = ("seeds = [1, 2]", "seeds = [1, 2, 3]")
NO_SEARCH = [
    ("tuning = { seed = 9, learning_rates = [0.1, 0.2, 0.4], rounds = 2, extend = 0 }", ""),
    ("tune = { alpha = [0.1, 0.3] }", ""),
]


def test_differences_to_the_baseline_are_paired_by_seed(read: Read, reached: Reached) -> None:
    """0.1, 0.2, 0.3 over it: mean 0.2, deviation 0.1, standard error 0.1 / sqrt(3), however far seeds are apart."""
    base = {1: 0.2, 2: 0.6, 3: 0.4}
    plan = Plan(
        read(BASELINE, THREE_SEEDS, *NO_SEARCH),
        lambda cell: reached(base[cell.seed] + 0.1 * cell.seed * (cell.label == "FedCM")),
    )
    average, momentum = rows(plan)
    assert average.difference is None
    assert momentum.difference is not None
    assert momentum.lasts == pytest.approx({1: 0.3, 2: 0.8, 3: 0.7})
    assert (momentum.difference.mean, momentum.difference.standard_error) == pytest.approx((0.2, 0.1 / math.sqrt(3)))
    text = report.tables(plan)
    assert "| last 2 | to FedAvg | rounds to 50 % |" in text
    assert "| **60.00 ± 26.46** | +20.00 ± 5.77 |" in text
    assert "First is FedCM, then FedAvg: +20.00 ± 5.77, paired over 3 seeds." in text


def test_a_difference_has_the_seeds_that_both_rows_have(read: Read, reached: Reached) -> None:
    """Under seed 2 the baseline diverged; the difference of seed 1 has no standard error."""
    plan = Plan(
        read(BASELINE, *NO_SEARCH),
        lambda cell: reached(0.5, diverged=1 if (cell.label, cell.seed) == ("FedAvg", 2) else None),
    )
    assert rows(plan)[1].difference == Spread(0.0, None, 1)


def test_a_further_metric_has_its_own_choice_and_its_own_table(read: Read, reached: Reached) -> None:
    """Accuracy is best at rate 0.1, balanced_accuracy at 0.4; a cell that both need is one line of the rounds file."""
    also = 'report = { target = 0.5, last = 2, also = ["balanced_accuracy"] }'

    def load(cell: Cell) -> CellResult:
        rate = cell.settings["run"]["local"]["learning_rate"]
        result = reached(1 - rate, 1 - rate)
        return replace(result, rounds=tuple(replace(row, metrics={"balanced_accuracy": rate}) for row in result.rounds))

    plan = Plan(read(BASELINE, (BASELINE[1], also)), load)
    found = {(row.metric, row.label): row for row in rows(plan)}
    chosen = {key: row.choice.learning_rate for key, row in found.items() if row.choice}
    assert chosen == {
        ("accuracy", "FedAvg"): 0.1, ("accuracy", "FedCM"): 0.1,
        ("balanced_accuracy", "FedAvg"): 0.4, ("balanced_accuracy", "FedCM"): 0.4,
    }  # fmt: skip
    assert found["balanced_accuracy", "FedCM"].last == pytest.approx(Spread(0.4, 0.0, 2))
    assert "### Test balanced_accuracy, even" in report.tables(plan)
    lines = list(csv.DictReader(io.StringIO(results.results_csv(plan))))
    assert len({line["cell"] for line in lines}) == plan.done() == 9 + 2 * 4
    assert {(line["learning_rate"], line["accuracy"], line["balanced_accuracy"]) for line in lines} == {
        ("0.1", "0.9", "0.1"), ("0.2", "0.8", "0.2"), ("0.4", "0.6", "0.4"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("report_keys", "message"),
    [
        ('baseline = "FedNone"', r"report\.baseline: expected a label of the table, got 'FedNone'"),
        ('also = ["loss", "loss"]', r"report\.also: expected each metric once, and not report\.metric; got loss again"),
    ],
)
def test_a_baseline_that_is_no_row_and_a_metric_twice_are_refused(read: Read, report_keys: str, message: str) -> None:
    """Before the first run, with what was expected."""
    with pytest.raises(UsageError, match=message):
        read(("report = { target = 0.5, last = 2 }", f"report = {{ {report_keys} }}"))


AVERAGING = (
    "local = { learning_rate = 0.1 }",
    'local = { learning_rate = 0.1 }\naveraging = { method = "ema", decay = 0.9 }',
)


def test_averaged_models_have_a_choice_and_a_table_of_their_own(read: Read, reached: Reached) -> None:
    """With [averaging]: the settings that are best for the averaged model, and its numbers beside the latest one's."""

    def load(cell: Cell) -> CellResult:
        rate = cell.settings["run"]["local"]["learning_rate"]
        result = reached(rate, rate)  # the latest model is best at the highest rate, the averaged one at the lowest
        averaged = {"averaged_accuracy": 0.9 - rate}
        return replace(result, rounds=tuple(replace(row, metrics=averaged) for row in result.rounds))

    plan = Plan(read(AVERAGING), load)
    found = {(row.metric, row.label): row for row in rows(plan)}
    latest, averaged = found["accuracy", "FedAvg"], found["averaged_accuracy", "FedAvg"]
    assert latest.choice is not None
    assert averaged.choice is not None
    assert (latest.choice.learning_rate, averaged.choice.learning_rate) == (0.4, 0.1)
    assert averaged.final == pytest.approx(Spread(0.8, 0.0, 2))
    assert "### Test averaged_accuracy, even" in report.tables(plan)
    assert "80.00" in report.tables(plan)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param(
            [("last = 2 }", 'last = 2, also = ["averaged_accuracy"] }')],
            r"expected the section \[averaging\]",
            id="none",
        ),
        pytest.param(
            [(AVERAGING[0], AVERAGING[1].replace('"ema", decay = 0.9', '"tail", start = 2'))],
            r"averaging.start: expected less than tuning.rounds \(2\), got 2",
            id="search-too-short",
        ),
    ],
)
def test_averaged_models_that_no_run_has_are_refused(read: Read, changes: list[tuple[str, str]], message: str) -> None:
    """Before hours of runs."""
    with pytest.raises(UsageError, match=message):
        read(*changes)
