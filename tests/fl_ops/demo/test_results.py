"""The results of a demo as sentences, tables, JSON and a plot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from fl_ops.demo import conclusions, plot, report
from fl_ops.demo.results import as_json
from fl_ops.demo.settings import DemoSettings, read_grid
from tests.fl_ops.demo.conftest import Finished
from tests.marks import slow_except

HIGH, LOW = [0.2, 0.9, 1.0], [0.1, 0.8, 0.6]


def test_the_numbers_of_a_run(finished: Finished) -> None:
    """Of 0.2, 0.9, 1.0: final 1.0, mean 0.7, worst 0.2, 90 % after two rounds, three rounds of bytes."""
    (result,) = finished(DemoSettings(algorithms=("fedcm",)), HIGH).results
    curve = result.averaged
    assert (curve.final, curve.worst_last, curve.rounds_to_target) == (1.0, 0.2, 2)
    assert (curve.mean_last, result.curves["latest"].mean_last) == pytest.approx((0.7, 0.07))
    assert (result.bytes_down, result.bytes_up) == (3072, 1536)


def test_only_the_last_rounds_count_for_mean_and_worst(finished: Finished) -> None:
    """Two bad rounds before five good ones do not count."""
    (result,) = finished(DemoSettings(algorithms=("fedcm",)), [0.0, 0.0, *[0.95] * 5]).results
    assert (result.averaged.worst_last, len(result.averaged.last)) == (0.95, 5)


def test_the_better_algorithm_is_named(finished: Finished) -> None:
    """Means 0.7 and 0.5: 20 points, 72 of 360 examples; the sentence depends on the numbers, not on the names."""
    for first, second, ahead, behind in ((HIGH, LOW, "FedCM", "FedAvg"), (LOW, HIGH, "FedAvg", "FedCM")):
        text = conclusions.sentences(finished(DemoSettings(), first, second))[0]
        assert f"averaged models, the mean accuracy of {ahead} is 20.0 points, or 72.0 of 360 examples" in text
        assert f"above that of {behind}" in text


def test_a_tie_is_a_tie(finished: Finished) -> None:
    """With equal numbers, no algorithm is better."""
    text = conclusions.sentences(finished(DemoSettings(), HIGH, HIGH))[0]
    assert "FedCM and FedAvg have the same mean accuracy" in text


def test_the_sentences_have_the_spread_over_seeds(finished: Finished) -> None:
    """The difference of both models on the seeds of the check."""
    text = " ".join(conclusions.sentences(finished(DemoSettings(), HIGH, LOW)))
    assert "one run is one sample" in text
    assert f"On {len(read_grid()['check']['seeds'])} other seeds (201 to " in text
    assert "with the latest models it was" in text


def test_the_latest_models_are_compared_too(finished: Finished) -> None:
    """Means of 0.07 and 0.05, beside those of the averaged models."""
    text = " ".join(conclusions.sentences(finished(DemoSettings(), HIGH, LOW)))
    assert "With the latest models the mean accuracy is 7.00 % for FedCM and 5.00 % for FedAvg." in text


@pytest.mark.parametrize(
    ("settings", "reservation"),
    [
        (DemoSettings(rounds=3), "another number of rounds or clients"),
        (DemoSettings(clients=4), "another number of rounds or clients"),
        (DemoSettings(seed=103), "Seed 103 was used in the grid search"),
        (DemoSettings(learning_rate=0.5), "The rate 0.5 was given by --learning-rate"),
        (DemoSettings(task="my_task:Wine"), "not tuned for my_task:Wine"),
    ],
)
def test_a_caveat_where_the_grid_search_does_not_fit(
    finished: Finished, settings: DemoSettings, reservation: str
) -> None:
    """Another setting than the grid's, or a seed of the grid itself; the usual demo has no such sentence."""
    assert reservation in " ".join(conclusions.sentences(finished(settings, HIGH, LOW)))
    assert reservation not in " ".join(conclusions.sentences(finished(DemoSettings(), HIGH, LOW)))


def test_one_algorithm_is_compared_with_nothing(finished: Finished) -> None:
    """No sentence about a gap."""
    assert conclusions.sentences(finished(DemoSettings(algorithms=("fedcm",)), HIGH)) == []


def test_the_table_fits_a_terminal_and_has_all_numbers(finished: Finished) -> None:
    """80 columns, no number is broken; a target that was missed is never reached."""
    console = Console(width=80, record=True, file=None, quiet=True)
    lines = console.render_lines(report.comparison_table(finished(DemoSettings(), HIGH, LOW).results))
    text = ["".join(part.text for part in line).split() for line in lines]
    assert ["Averaged", "model:", "rounds", "to", "90", "%", "2", "never"] in text
    for model, values in (("Averaged", ["70.00", "%", "50.00", "%"]), ("Latest", ["7.00", "%", "5.00", "%"])):
        assert [model, "model:", "mean", "of", "the", "last", "3", "rounds", *values] in text


def test_the_page_lists_grid_and_choice(finished: Finished) -> None:
    """Each cell of the grid, the chosen ones bold, the rule, the command, and the run's own numbers."""
    text = report.page(finished(DemoSettings(), HIGH, LOW), "p.png", "n.json")
    grid = as_json(finished(DemoSettings(), HIGH, LOW))["grid"]
    for cell in grid["cells"]:
        assert f" {100 * cell['averaged']['mean']:.2f} % " in text.replace("**", "")
    assert text.count("**") == 2 * len(grid["choice"])
    assert grid["rule"] in text
    assert "| Averaged model: final accuracy | 100.00 % | 60.00 % |" in text
    assert "](p.png)" in text
    assert "](n.json)" in text


def test_the_page_names_the_command_that_repeats_it(finished: Finished) -> None:
    """Only what differs from the defaults."""
    settings = DemoSettings(algorithms=("fedavg",), seed=3, learning_rate=0.5, options={"data_root": "data"})
    text = report.page(finished(settings, LOW), "p.png", "n.json")
    assert "\nfl demo --algorithm fedavg --seed 3 --learning-rate 0.5 --data-root data\n" in text


def test_the_page_of_another_task_names_the_source_of_its_settings(finished: Finished) -> None:
    """There is no grid to show."""
    text = report.page(finished(DemoSettings(task="my_task:Wine"), HIGH, LOW), "p.png", "n.json")
    assert "- FedAvg: rate 0.1 (default, not tuned)" in text
    assert "Validation accuracy" not in text


def test_the_facts_are_json_and_whole(finished: Finished) -> None:
    """Settings, seeds, rounds, versions, grid and choice."""
    facts = json.loads(json.dumps(as_json(finished(DemoSettings(seed=4), HIGH, LOW))))
    assert facts["settings"]["seed"] == facts["settings"]["partition"]["seed"] == 4
    assert [one["accuracy"]["averaged"] for one in facts["algorithms"]["fedavg"]["rounds"]] == LOW
    assert {facts["algorithms"]["fedavg"][model]["final"] for model in ("averaged", "latest")} == {0.6, 0.06}
    assert facts["grid"]["choice"].keys() == {"fedavg", "fedcm"}
    assert {"python", "torch", "impetus-fl"} <= facts["versions"].keys()


@pytest.mark.parametrize("rounds", slow_except([1, 3, 12], 12))
def test_a_picture_is_drawn_for_any_number_of_rounds(finished: Finished, tmp_path: Path, rounds: int) -> None:
    """With more than ten, the last ones are shown closer; equal values make no empty axis, and nothing warns."""
    demo = finished(DemoSettings(rounds=rounds), [0.5] * rounds, [0.5] * rounds)
    plot.draw(demo.settings, demo.results, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 10_000
