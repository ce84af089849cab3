"""Plots accuracy by round: the averaged model of each algorithm, and its latest model as a faint line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fl_common.units import percent
from fl_ops.demo.results import Result
from fl_ops.demo.settings import DIRICHLET_ALPHA, LAST, TARGET, DemoSettings
from fl_ops.render.figures import COLOURS, INK, new_figure, plain_axes

_LINES: dict[str, dict[str, Any]] = {
    "averaged": {"linewidth": 2.2, "zorder": 4},
    "latest": {"linewidth": 1.2, "zorder": 3, "alpha": 0.4},
}
"""Model -> how its line is drawn."""


def draw(settings: DemoSettings, results: Sequence[Result], path: Path, method: str = "dirichlet") -> None:
    """Write the plot as PNG: all rounds, and next to them the last ones enlarged. Opens no window.

    method: of the partition.
    """
    figure = new_figure(figsize=(10, 4.8), dpi=150)
    last = len(results[0].averaged.last)
    enlarge = last < settings.rounds
    panels = figure.subplots(1, 1 + enlarge, width_ratios=[2.1, 1][: 1 + enlarge], squeeze=False)[0]
    for axes in panels:
        _frame(axes)
        for result, colour in zip(results, COLOURS * len(results), strict=False):
            _curves(axes, result, colour)
    _all_rounds(panels[0], settings, method)
    if enlarge:
        _last_rounds(panels[1], settings.rounds, results)
    figure.savefig(path)


def _heading(settings: DemoSettings, method: str) -> str:
    how = f"Dirichlet {DIRICHLET_ALPHA:g}" if method == "dirichlet" else f"{method} partition"
    clients = f"{settings.clients_per_round} of {settings.clients} clients a round"
    return f"{settings.task}, {clients}, {how}, seed {settings.seed}"


def _all_rounds(axes: Any, settings: DemoSettings, method: str) -> None:
    axes.set_xlim(0.5, settings.rounds + 0.5)
    axes.set_ylim(0, 102)
    axes.set_ylabel("Accuracy on held-out data, %", color=INK)
    axes.set_title(_heading(settings, method), loc="left", color=INK, fontsize=11)
    axes.annotate(
        percent(TARGET, 0), (0.995, 100 * TARGET), xycoords=("axes fraction", "data"), xytext=(0, -3),
        textcoords="offset points", ha="right", va="top", color="#777777", fontsize=9,
    )  # fmt: skip
    axes.legend(
        title=f"Mean of the last {min(LAST, settings.rounds)} rounds", alignment="left", loc="lower right",
        frameon=False, labelcolor=INK, fontsize=9.5,
    )  # fmt: skip


def _last_rounds(axes: Any, rounds: int, results: Sequence[Result]) -> None:
    last = len(results[0].averaged.last)
    values = [100 * accuracy for result in results for curve in result.curves.values() for accuracy in curve.last]
    margin = max(0.08 * (max(values) - min(values)), 0.2)
    axes.set_xlim(rounds - last + 0.5, rounds + 0.5)
    axes.set_ylim(min(values) - margin, max(values) + margin)
    axes.set_title(f"The last {last} rounds, enlarged", loc="left", color=INK, fontsize=11)


def _frame(axes: Any) -> None:
    axes.axhline(100 * TARGET, color="#999999", linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    axes.set_xlabel("Rounds done", color=INK)
    axes.locator_params(axis="x", integer=True)
    plain_axes(axes, labels=10)


def _curves(axes: Any, result: Result, colour: str) -> None:
    rounds = [row.round + 1 for row in result.rounds]
    for model, curve in result.curves.items():
        label = f"{result.label}, {model} model: {percent(curve.mean_last, 1)}"
        values = [100 * accuracy for accuracy in curve.accuracies]
        axes.plot(rounds, values, color=colour, label=label, **_LINES[model])
