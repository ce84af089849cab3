"""Several runs on one axis: by rounds, bytes or time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from fl_common.units import ACCURACY, base_metric
from fl_web.charts import AXES, breaks, evaluated_every, finite, metric_names, position, thinned
from fl_web.coordinator.calls import WrongInput
from fl_web.coordinator.reader import Reader
from fl_web.facts.rounds import Round, seconds_of
from fl_web.views.view import Context, Params, View
from protos.fl.v1 import admin_pb2 as pb

MOST_RUNS = 8
"""The most runs in one comparison: more curves cannot be told apart."""
_OFFERED = 60
"""Newest runs that the form offers."""
_TABLE_ROWS = 40


@dataclass(frozen=True, slots=True)
class Compared:
    """One run of a comparison."""

    run: pb.RunStatus
    rounds: list[Round]
    metric: str

    @property
    def created(self) -> float:
        """Unix seconds."""
        return seconds_of(self.run.created)

    def value(self, of: Round) -> float | None:
        """The metric of a round."""
        return of.training_loss if self.metric == "training_loss" else of.metrics.get(self.metric)

    def curve(self, most: int) -> list[Round]:
        """The rounds with a value, thinned."""
        with_value = [row for row in self.rounds if self.value(row) is not None]
        kept = thinned([float(row.round) for row in with_value], [self.value(row) or 0.0 for row in with_value], most)
        return [with_value[index] for index in kept]

    @property
    def breaks(self) -> list[int]:
        """Where the curve is interrupted."""
        every = 1 if self.metric == "training_loss" else evaluated_every(self.run, self.metric)
        return breaks(((row.round, self.value(row)) for row in self.rounds), every)

    @property
    def best(self) -> Round | None:
        """The round with the best value; None without one, and for a metric whose direction nobody declared."""
        with_value = [row for row in self.rounds if finite(self.value(row)) is not None]
        lower = True if self.metric == "training_loss" else self.run.lower_is_better.get(self.metric)
        if lower is None:
            return None
        sign = -1 if lower else 1
        return max(with_value, key=lambda row: sign * (self.value(row) or 0.0), default=None)

    @property
    def last(self) -> Round | None:
        """The newest round with a value."""
        return next((row for row in reversed(self.rounds) if self.value(row) is not None), None)

    def position(self, of: Round) -> dict[str, float]:
        """Where a round lies on each axis."""
        return position(of, self.created)


async def compared(reader: Reader, params: Params) -> tuple[list[Compared], list[str]]:
    """The chosen runs, and the metrics that they have."""
    chosen = params.texts("run")
    if len(chosen) > MOST_RUNS:
        raise WrongInput(f"run: expected at most {MOST_RUNS} runs to compare, got {len(chosen)}")
    runs = await asyncio.gather(*(reader.run(run_id) for run_id in chosen))
    rounds = await asyncio.gather(*(reader.rounds(run_id) for run_id in chosen))
    names = sorted(
        {name for of_run in rounds for name in metric_names(of_run)},
        key=lambda name: (name != "accuracy", name.startswith("averaged_"), name),
    )
    if any(of.training_loss is not None for of_run in rounds for of in of_run):
        names.append("training_loss")
    wanted = params.text("metric")
    metric = wanted if wanted in names else next(iter(names), "accuracy")
    return [Compared(run, of_run, metric) for run, of_run in zip(runs, rounds, strict=True)], names


async def _context(reader: Reader, params: Params) -> Context:
    (chosen_runs, metrics), overview = await asyncio.gather(
        compared(reader, params), reader.overview(_OFFERED, search=params.text("q"))
    )
    chosen = [run.run.run_id for run in chosen_runs]
    return {
        "title": "Compare",
        "compared": chosen_runs,
        "chosen": chosen,
        "offered": [run for run in overview.runs if run.run_id not in chosen],
        "offered_found": overview.runs_found,
        "metric": chosen_runs[0].metric if chosen_runs else "accuracy",
        "metrics": metrics,
        "axis": params.one_of("x", AXES),
        "axes": AXES,
        "most": MOST_RUNS,
        "table_rows": _TABLE_ROWS,
        "params": params,
        "number": overview.history_number,
    }


def compare_json(runs: list[Compared], most: int) -> dict[str, Any]:
    """The curves for the browser."""
    curves = []
    for run in runs:
        kept = run.curve(most)
        curves.append({
            "run": run.run.run_id,
            "x": [run.position(of) for of in kept],
            "values": [finite(run.value(of)) for of in kept],
            "breaks": run.breaks,
        })  # fmt: skip
    unit = "share" if runs and base_metric(runs[0].metric) == ACCURACY else "number"
    return {"unit": unit, "curves": curves}


COMPARE = View("compare", _context, ("outcome",), pause_s=2.0, refresh_s=5.0)
