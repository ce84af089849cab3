"""The plot of a sweep: round time with its lower bounds, and server memory, by number of clients and by model size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from benchmarks.sweep_results import RESNET18, Result, of_series

LINES = (
    ("round_s_median", "Impetus", "#0b6e99", "o", "-"),
    ("floor_grpc_s", "the same bytes, bare gRPC streams", "#c0392b", "s", "--"),
    ("floor_tcp_s", "the same bytes, raw TCP", "#7f8c8d", "^", ":"),
)
"""Key, label, colour, marker and style."""


def draw(results: Sequence[Result], path: Path) -> None:
    """Write the plot as SVG. The same numbers give the same file."""
    by_clients, by_size = of_series("clients", results), of_series("sizes", results)
    with mpl.rc_context({"svg.hashsalt": "round-overhead", "svg.fonttype": "none", "font.size": 10}):
        figure, grid = plt.subplots(2, 2, figsize=(10, 7.2), layout="constrained", sharey="row")
        clients, sizes = (
            [result["clients"] for result in by_clients],
            [_megabytes(result["params"]) for result in by_size],
        )
        for axes, series, xs in ((grid[0, 0], by_clients, clients), (grid[0, 1], by_size, sizes)):
            _times(axes, series, xs)
        for axes, series, xs in ((grid[1, 0], by_clients, clients), (grid[1, 1], by_size, sizes)):
            _memory(axes, series, xs)
        grid[0, 0].set_ylabel("seconds a round (median)")
        grid[1, 0].set_ylim(bottom=0)
        grid[1, 0].set_ylabel("server's resident memory, MB")
        grid[0, 1].legend(loc="upper left", frameon=False)
        grid[1, 0].legend(loc="upper left", frameon=False)
        grid[0, 0].set_title(f"a model of {RESNET18:,} parameters ({_megabytes(RESNET18):.1f} MB)")
        grid[0, 1].set_title("10 clients")
        for axes in grid[:, 0]:
            _ticks(axes, clients, "clients, each in every round")
        for axes in grid[:, 1]:
            _ticks(axes, sizes, "size of the model, MB")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def _times(axes: Axes, series: Sequence[Result], xs: Sequence[float]) -> None:
    for key, label, colour, marker, style in LINES:
        axes.plot(xs, [result[key] for result in series], color=colour, marker=marker, linestyle=style, label=label)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _memory(axes: Axes, series: Sequence[Result], xs: Sequence[float]) -> None:
    idle = [result["server_rss_mb_idle"] for result in series]
    bound = [result["server_rss_mb_idle"] + 4 * _megabytes(result["params"]) * 1e6 / 2**20 for result in series]
    axes.plot(xs, [result["server_rss_mb"] for result in series], color="#0b6e99", marker="o", label="peak")
    axes.plot(xs, bound, color="#c0392b", linestyle="--", label="goal: idle + 4 models")
    axes.plot(xs, idle, color="#7f8c8d", linestyle=":", label="idle")


def _ticks(axes: Axes, values: Sequence[float], label: str) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(list(values)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    axes.set_xlabel(label)
    axes.grid(alpha=0.25)


def _megabytes(params: int) -> float:
    return params * 4 / 1e6
