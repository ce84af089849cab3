"""The picture of runs."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import pytest

from fl_ops.render.plot import draw
from protos.fl.v1 import admin_pb2


def a_run(metric: str, **metrics: float) -> admin_pb2.GetRunResponse:
    """A run with two rounds of these metrics, which chooses its best round by one of them."""
    run = admin_pb2.GetRunResponse(
        rounds=[admin_pb2.RoundSummary(round=number, metrics=metrics) for number in range(2)]
    )
    run.run.spec.stop.metric = metric
    return run


@pytest.fixture
def panels(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[float]]]:
    """(title, first values of its lines) of each panel of what is drawn."""
    figure, shown = pytest.importorskip("matplotlib.figure"), list[tuple[str, list[float]]]()

    def keep(drawn: object, *_: object, **__: object) -> None:
        for axes in drawn.axes:  # type: ignore[attr-defined]  # matplotlib has no types
            first = [float(line.get_ydata()[0]) for line in axes.lines if len(line.get_ydata())]
            shown.append((axes.get_title(loc="left"), first))

    monkeypatch.setattr(figure.Figure, "savefig", keep)
    return shown


def test_each_run_has_its_own_metric_in_the_picture(panels: list[tuple[str, list[float]]]) -> None:
    """R2 of the server, of all clients and its mean over them; what the other panels show has none of its own."""
    clients = {"clients_r2": -0.4, "clients_r2_mean": -0.5, "clients_r2_std": 0.1}
    runs = {
        "a": a_run("r2", loss=2.0, r2=-0.3, **clients),
        "b": a_run("clients_mae_worst_decile", loss=1.0, clients_mae_worst_decile=7.0),
        "c": a_run("loss", loss=3.0),
    }
    assert draw(runs, "rounds", BytesIO())
    assert panels == [
        ("r2", [-0.3, -0.4, -0.5]),
        ("clients_mae_worst_decile", [7.0]),
        ("Loss", [2.0, 1.0, 3.0]),
    ]


def test_the_legend_has_what_private_runs_have_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the tighter accountant where it has answered; of records, the most that a device states."""
    figure, legends = pytest.importorskip("matplotlib.figure"), list[list[str]]()

    def keep(drawn: Any, *_: object, **__: object) -> None:
        legends.extend([text.get_text() for text in axes.get_legend().get_texts()] for axes in drawn.axes)

    monkeypatch.setattr(figure.Figure, "savefig", keep)
    runs = {name: a_run("loss", loss=1.0) for name in ("plain", "first", "both", "records")}
    for name in ("first", "both"):
        runs[name].run.spec.privacy.delta = 0.01
        runs[name].run.privacy.epsilon = 2.789
    runs["both"].run.privacy.tight_epsilon = 2.291
    runs["records"].run.stated_privacy.CopyFrom(
        admin_pb2.StatedPrivacy(clients=2, median=0.5, largest=0.64, delta=1e-5)
    )
    assert draw(runs, "rounds", BytesIO())
    assert legends == [
        ["plain", "first, epsilon 2.79 at delta 0.01", "both, epsilon 2.29 at delta 0.01",
         "records, epsilon up to 0.64 at delta 1e-05"]
    ]  # fmt: skip


def test_runs_without_values_are_not_drawn() -> None:
    """The caller says so."""
    assert not draw({"a": a_run("r2")}, "rounds", BytesIO())
