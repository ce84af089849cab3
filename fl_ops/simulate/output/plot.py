"""The plot of simulated runs: the metric by round, a line for each seed and their mean."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from pathlib import Path
from statistics import fmean

from fl_ops.simulate.output.results import SeedResult

PLOT = "metric-by-round.png"
_FEW = 20
_COLOUR, _PALE, _INK = "#0b6e99", "#9cc4d6", "#333333"


def draw(results: Sequence[SeedResult], path: Path) -> bool:
    """Write the plot as PNG. Returns False, without a file, if nothing was evaluated."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    run = results[0].settings["run"]
    metric = str(run["stop"]["metric"])
    curves = [
        {each.round + 1: each.metrics[metric] for each in result.evaluated if metric in each.metrics}
        for result in results
    ]
    if not any(curves):
        return False
    figure = Figure(figsize=(7, 4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for curve in curves:
        axes.plot(list(curve), list(curve.values()), color=_PALE, linewidth=1.0, marker=_marker(curve), markersize=3)
    shared = sorted(set.intersection(*(set(curve) for curve in curves)))
    means = [fmean(curve[at] for curve in curves) for at in shared]
    axes.plot(shared, means, color=_COLOUR, linewidth=1.8, marker=_marker(shared), markersize=4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("Rounds done", color=_INK)
    axes.set_ylabel(metric, color=_INK)
    seeds = f"mean and each of {len(curves)} seeds" if len(curves) > 1 else f"seed {results[0].seed}"
    axes.set_title(f"{run['task']['name']}, {run['algorithm']['name']}, {seeds}", loc="left", color=_INK, fontsize=10)
    axes.grid(axis="y", color="#ebebeb", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    return True


def _marker(points: Sized) -> str:
    """Few points are drawn, too: one alone has no line."""
    return "o" if len(points) <= _FEW else ""
