"""Computes what the studies of docs/measurements/papers.md compare across tables: `python -m docs.source.studies`.

It reads the results.csv of the studies, writes the parts of the page between its own marks, and draws the figure of
the effective rates.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

PAGE = Path(__file__).parents[1] / "measurements/papers.md"
PARTICIPATION = ("study-fedcm-100-clients", "study-fedcm-500-clients")
FEWER_STEPS = ", 2 steps"
"""End of the labels of rows with 500 clients that have as many epochs, not steps, as those with 100."""
EFFECTIVE_RATE = "study-hsu"
_RATE = re.compile(r"FedAvg(?:M (?P<beta>[\d.]+))?, effective rate (?P<rate>[\d.]+)")
Curves = dict[tuple[str, str], dict[int, list[float]]]
"""(method, split) -> seed -> the accuracy of each evaluation, in percent."""


def curves(study: str) -> Curves:
    """The reported runs of a study; empty before it was run."""
    path = PAGE.parent / "papers" / study / "results.csv"
    found: Curves = {}
    if path.is_file():
        for line in csv.DictReader(path.read_text(encoding="utf-8").splitlines()):
            if line["stage"] == "final" and line["accuracy"]:
                seeds = found.setdefault((line["method"], line["split"]), {})
                seeds.setdefault(int(line["seed"]), []).append(100.0 * float(line["accuracy"]))
    return found


def oscillation(accuracies: Sequence[float]) -> float:
    """The deviation of the differences of neighbouring evaluations, over the last third of a run."""
    late = accuracies[-(len(accuracies) // 3) :]
    return stdev(after - before for before, after in pairwise(late))


def _last_five(accuracies: Sequence[float]) -> float:
    return fmean(accuracies[-5:])


def participation() -> str:
    """How much each method loses from 10 % of 100 clients to 2 % of 500, and how much it oscillates."""
    large, small = map(curves, PARTICIPATION)
    lines = [
        "| Method | split | lost | oscillation, 100 clients | oscillation, 500 |",
        "| --- | --- | --: | --: | --: |",
    ]
    for (label, split), small_runs in small.items():
        large_runs = large.get((label.removesuffix(FEWER_STEPS), split), {})
        if not (seeds := sorted(large_runs.keys() & small_runs.keys())):
            continue
        accuracy = [_over(runs, seeds, _last_five) for runs in (large_runs, small_runs)]
        swing = [_over(runs, seeds, oscillation) for runs in (large_runs, small_runs)]
        lost = [one - other for one, other in zip(*accuracy, strict=True)]
        numbers = [_mean(values) for values in (lost, *swing)]
        lines.append(f"| {label} | {split} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def _over(runs: dict[int, list[float]], seeds: Sequence[int], value: Callable[[Sequence[float]], float]) -> list[float]:
    return [value(runs[seed]) for seed in seeds]


def _mean(values: Sequence[float]) -> str:
    return f"{fmean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def effective_rates() -> Iterator[tuple[str, str, float, float]]:
    """(split, beta, effective rate, mean accuracy of the last three evaluations over the seeds)."""
    for (method, split), seeds in curves(EFFECTIVE_RATE).items():
        if found := _RATE.fullmatch(method):
            accuracy = fmean(fmean(values[-3:]) for values in seeds.values())
            yield split, found["beta"] or "0", float(found["rate"]), accuracy


def draw(path: Path) -> None:
    """Accuracy against the effective rate, a panel for each split and a line for each beta."""
    points = list(effective_rates())
    splits = list(dict.fromkeys(point[0] for point in points))
    rates = sorted({point[2] for point in points})
    figure = Figure(figsize=(2.6 * len(splits), 2.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(splits), sharey=True, squeeze=False)[0]
    for axes, split in zip(panels, splits, strict=True):
        for beta in dict.fromkeys(point[1] for point in points if point[0] == split):
            line = sorted((rate, accuracy) for at, of, rate, accuracy in points if (at, of) == (split, beta))
            axes.plot(*zip(*line, strict=True), marker="o", label=f"beta {beta}")
        axes.set(xscale="log", title=split, xlabel="eta / (1 - beta)")
        axes.minorticks_off()
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.legend(fontsize=7)
    panels[0].set_ylabel("test accuracy, %")
    figure.savefig(path, dpi=80)


def updated(page: str) -> str:
    """The page with the part between the marks computed again."""
    begin, end = "<!-- studies, participation: begin -->", "<!-- studies, participation: end -->"
    before, rest = page.split(begin)
    return f"{before}{begin}\n\n{participation()}\n\n{end}{rest.split(end)[1]}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    if curves(EFFECTIVE_RATE):
        draw(PAGE.parent / "papers" / EFFECTIVE_RATE / "effective-rates.png")
