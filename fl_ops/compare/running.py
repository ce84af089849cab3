"""One cell as a run in this process: the only module of the comparison that knows how runs are made."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fl_ops.compare.cells import Cell, CellResult, RoundRow
from fl_ops.errors import Refused
from fl_ops.simulate.clients import deal
from fl_ops.simulate.settings import Plan, SimulationSection
from fl_ops.simulate.simulation import RoundResult, Simulation
from fl_server.run_config import from_values


@dataclass(frozen=True)
class RunCell:
    """Runs cells. places: options of the task that say where its data lie, which decide no number."""

    places: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, cell: Cell) -> CellResult:
        """A run that ends because its numbers are not finite any more is a result too; its rounds until then are kept.

        Raises:
            Refused: the run failed for another reason. TaskError, AlgorithmError: it cannot be begun.
        """
        config = from_values(dict(cell.settings["run"]))
        task = config.task.model_copy(update={"options": {**config.task.options, **self.places}})
        simulation = SimulationSection.model_validate(cell.settings["simulation"])
        dealt = deal(Plan(config.model_copy(update={"task": task}), simulation), cell.seed)
        began = time.monotonic()
        with Simulation(dealt.config, dealt.clients, task=dealt.evaluated) as run:
            rounds = tuple(map(_row, run.rounds()))
            status, reason = run.ending or ("completed", "")
        if status == "failed" and "finite" not in reason:
            raise Refused(f"{cell.label}, {cell.stage} with seed {cell.seed}: {reason}")
        return CellResult(rounds, time.monotonic() - began, len(rounds) if status == "failed" else None, reason)


def _row(done: RoundResult) -> RoundRow:
    return RoundRow(
        round=done.round,
        accepted=len(done.accepted),
        training_loss=done.training_loss,
        accuracy=done.metrics.get("accuracy"),
        loss=done.metrics.get("loss"),
        bytes_down=done.bytes_down,
        bytes_up=done.bytes_up,
        seconds=round(done.seconds, 4),
        model=done.digest,
    )
