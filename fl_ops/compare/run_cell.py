"""Runs one cell of a comparison: a simulation, which is saved at times and continued from its save."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fl_ops.compare.cells import Cell, CellResult, RoundRow
from fl_ops.errors import Refused
from fl_ops.simulate.clients import prepare
from fl_ops.simulate.engine_choice import SEQUENTIAL, EngineOptions
from fl_ops.simulate.reports import RoundResult
from fl_ops.simulate.saving.save import RunSave
from fl_ops.simulate.settings import SimulationConfig, SimulationSection
from fl_ops.simulate.simulation import Simulation
from fl_server.run_settings.spec import from_values

OnRound = Callable[[RoundRow], None]
"""Called in a worker for every round that is done."""


class _NotContinuedError(Exception):
    """The saved state of a cell is damaged, or another version of the program made it: the cell begins again."""


@dataclass(frozen=True)
class Means:
    """What a cell may use. workers: processes that train the clients of a round; the models do not depend on them."""

    workers: int = 1
    saved: Path | None = None
    """The folder for the run's state, from which a later call continues the same bits. None: it is not saved."""


@dataclass(frozen=True)
class RunCell:
    """Simulates one cell in each call."""

    data_location: Mapping[str, Any] = field(default_factory=dict)
    """Options of the task for the location of its data; they change no number."""
    engine: EngineOptions = SEQUENTIAL
    """How clients train. Workers inside a cell are added only to the sequential engine."""

    def __call__(self, cell: Cell, on_round: OnRound, means: Means) -> CellResult:
        """Run a cell from its saved state, if there is one. A run that diverges is a result, too, with its rounds.

        Raises:
            Refused: the run failed for another reason.
            TaskError, AlgorithmError: the run cannot be started.
        """
        try:
            return self._run(cell, on_round, means)
        except _NotContinuedError:
            if means.saved:
                shutil.rmtree(means.saved)
            return self._run(cell, on_round, means)

    def _run(self, cell: Cell, on_round: OnRound, means: Means) -> CellResult:
        run = from_values(dict(cell.settings["run"]))
        task = run.task.model_copy(update={"options": {**run.task.options, **self.data_location}})
        section = SimulationSection.model_validate(cell.settings["simulation"])
        prepared = prepare(SimulationConfig(run.model_copy(update={"task": task}), section), cell.seed)
        began = time.monotonic()
        simulation = Simulation(
            prepared.config,
            prepared.clients,
            task=prepared.server_task,
            devices=prepared.devices,
            measure=section.measure,
            engine=EngineOptions(means.workers) if self.engine == SEQUENTIAL else self.engine,
        )
        with simulation, _saving(simulation, cell, means.saved) as (earlier, going):
            results = [*earlier]
            before = sum(done.seconds for done in earlier)
            for done in going:
                results.append(done)
                on_round(_row(done))
            simulation.with_last_measures(results)
            status, reason = simulation.ending or ("completed", "")
        rounds = tuple(map(_row, results))
        if status == "failed" and not simulation.diverged:
            raise Refused(f"{cell.label}, {cell.stage} with seed {cell.seed}: {reason}")
        diverged = len(rounds) if simulation.diverged else None
        return CellResult(rounds, before + time.monotonic() - began, diverged, reason)


@contextmanager
def _saving(
    simulation: Simulation, cell: Cell, folder: Path | None
) -> Iterator[tuple[list[RoundResult], Iterator[RoundResult]]]:
    """(rounds of the saved state, the other rounds, saved at times). Without a folder nothing is saved."""
    if folder is None:
        yield [], simulation.rounds()
        return
    try:
        save = RunSave(folder, {"cell": cell.digest})
    except Refused:  # another comparison runs the same cell
        yield [], simulation.rounds()
        return
    with save:
        try:
            earlier = save.restore(simulation)
        except Refused as error:
            raise _NotContinuedError from error
        with closing(save.rounds(simulation, earlier)) as rounds:
            yield earlier, rounds


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
        simulated_total_s=done.simulated_total_s,
        metrics=done.metrics,
        measured=done.measured,
    )
