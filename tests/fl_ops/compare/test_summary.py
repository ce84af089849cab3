"""Means, deviations and costs, worked out by hand, and the files that tell them."""

import csv
import io
import json
import math

import pytest

from fl_ops.compare import page, picture, results
from fl_ops.compare.plan import Plan
from fl_ops.compare.summary import rows
from fl_ops.errors import Misused


@pytest.fixture
def plan(read, reached):
    """FedAvg reaches 0.4 and 0.6 under its two seeds, FedCM 0.7 and 0.9; alpha 0.3 and rate 0.2 are best.

    Each run has three rounds of half, then two of the whole accuracy.
    """

    def load(cell):
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


def test_mean_and_sample_deviation_over_the_seeds(plan):
    """0.4 and 0.6: mean 0.5, deviation sqrt(0.01 + 0.01) = 0.1414; last, final and best are the same here."""
    row = rows(plan)[0]
    assert [spread.mean for spread in (row.final, row.last, row.best)] == pytest.approx([0.5] * 3)
    assert row.last.deviation == pytest.approx(math.sqrt(0.02))


def test_rounds_and_bytes_to_the_target_are_those_of_the_seeds_that_reached_it(plan):
    """FedAvg passes 0.5 under seed 2 alone, in its fourth round: 4 x 2 MB down, 4 x 1 MB up; in all 5 rounds."""
    row = rows(plan)[0]
    assert (row.rounds_to_target.mean, row.rounds_to_target.count) == (4, 1)
    assert (row.down_to_target.mean, row.up_to_target.mean, row.down.mean) == (8.0, 4.0, 10.0)


def test_no_rank_inside_the_deviations(plan):
    """FedCM leads by 0.3, both deviations are 0.1414, pooled 0.1414: FedAvg is not among the best."""
    assert [row.among_best for row in rows(plan)] == [False, True]


def test_within_one_pooled_deviation_both_are_among_the_best(read, reached):
    """0.5 +- 0.1414 and 0.6 +- 0.1414: they differ by less than 0.1414."""
    tops = {"FedAvg": 0.2, "FedCM": 0.3}
    plan = Plan(read(), lambda cell: reached(tops[cell.label] + 0.2 * min(cell.seed, 2)))
    assert [row.among_best for row in rows(plan)] == [True, True]


def test_a_diverged_seed_is_told_and_left_out(read, reached):
    """FedAvg's second seed diverges: mean of the other one, no deviation, not among the best."""
    plan = Plan(read(), lambda cell: reached(0.8, diverged=1 if (cell.label, cell.seed) == ("FedAvg", 2) else None))
    row = rows(plan)[0]
    assert (row.diverged, row.last.mean, row.last.deviation, row.among_best) == ((2,), 0.8, None, False)


def test_the_choice_and_whether_it_lies_at_an_edge(plan):
    """FedCM's best is 0.2 between 0.1 and 0.4; 0.4 diverged."""
    row = rows(plan)[1]
    assert (row.choice.learning_rate, row.choice.parameters, row.at_edge) == (0.2, {"alpha": 0.3}, False)


def test_an_unfinished_comparison_has_rows_without_numbers(read):
    """Nothing is run yet: no choice, no seeds."""
    row = rows(Plan(read(), lambda cell: None))[0]
    assert (row.choice, row.seeds, row.last) == (None, (), None)


def test_the_rounds_file_has_a_line_for_each_round(plan):
    """9 cells of the search with 2 rounds, 4 judging ones with 5."""
    lines = list(csv.DictReader(io.StringIO(results.results_csv(plan))))
    assert len(lines) == 9 * 2 + 4 * 5
    assert (
        lines[-1] | {"method": "FedCM", "seed": "2", "round": "4", "accuracy": "0.9", "parameters": "alpha 0.3"}
        == lines[-1]
    )


def test_the_summary_file_has_a_line_for_each_method_and_split(plan):
    """Mean and deviation in columns of their own."""
    lines = list(csv.DictReader(io.StringIO(results.summary_csv(plan))))
    assert [(line["method"], line["last_mean"], line["last_deviation"]) for line in lines] == [
        ("FedAvg", "0.5", "0.141421"), ("FedCM", "0.8", "0.141421"),
    ]  # fmt: skip


def test_the_facts_have_every_option_and_what_was_tried(plan):
    """Also options that nobody set, such as the order of a local step; a run that diverged has no accuracy."""
    row = json.loads(results.summary_json(plan))["rows"][1]
    assert row["settings"]["run"]["algorithm"]["parameters"]["order"] == "paper"
    assert {"learning_rate": 0.4, "parameters": {"alpha": 0.3}, "validation": None} in row["tried"]


def test_a_page_gets_its_tables_between_the_marks_and_keeps_the_rest(plan):
    """Filled in twice it is the same page; the best mean is bold."""
    marks = "before\n<!-- fl compare small: begin -->\nold\n<!-- fl compare small: end -->\nafter\n"
    once = page.filled(marks, plan)
    assert once == page.filled(once, plan)
    assert (once.startswith("before\n"), once.endswith("\nafter\n"), "old" in once) == (True, True, False)
    assert "| FedCM | 0.2 | alpha 0.3 | 80.00 ± 14.14 | **80.00 ± 14.14** |" in once


def test_a_page_without_marks_is_refused(plan):
    """Nothing is written into a page that did not ask for it."""
    with pytest.raises(Misused, match="expected the lines"):
        page.filled("a page", plan)


@pytest.mark.parametrize("axis", ["rounds", "megabytes"])
def test_a_picture_is_drawn(plan, axis, tmp_path):
    """A PNG, with a panel for each of the methods."""
    assert picture.draw(plan, "even", axis, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_without_runs_there_is_no_picture(read, tmp_path):
    """An empty one would say that there are results."""
    assert not picture.draw(Plan(read(), lambda cell: None), "even", "rounds", tmp_path / "picture.png")
