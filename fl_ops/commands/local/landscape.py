"""`fl landscape`: the loss of saved models along random directions, and how flat their minima are."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fl_common.command_help import FlagGroup
from fl_common.units import counted, measured, value
from fl_ops.commands.options import Context, command
from fl_ops.environment import check_plotting
from fl_ops.errors import Refused, UsageError
from fl_ops.files import Target, check_free, written_whole
from fl_ops.render import output
from fl_ops.render.fitted import FittedTable

if TYPE_CHECKING:
    from fl_ops.landscape.surface import Grid, Landscape
    from fl_ops.simulate.clients import PreparedRun
    from fl_ops.simulate.measures.section import SharpnessSection

CSV, PICTURE = "landscape.csv", "landscape.png"
_POINTS, _POINTS_OF_TWO = 41, 21


@dataclass(frozen=True)
class GridFlags(FlagGroup):
    """Where the models are evaluated."""

    two: Annotated[bool, typer.Option("--two", help="Two directions: contours in place of curves.")] = False
    points: Annotated[
        int | None,
        typer.Option(
            min=3, help=f"Odd number of points of an axis. Default: {_POINTS}, and {_POINTS_OF_TWO} with --two."
        ),
    ] = None
    radius: Annotated[float, typer.Option(min=1e-6, help="Ends of the axis; 1 moves each filter by its own norm.")] = (
        1.0
    )

    def grid(self) -> Grid:
        """The points. Raises UsageError for an even number: the model itself is in the middle."""
        from fl_ops.landscape.surface import Grid

        points = self.points or (_POINTS_OF_TWO if self.two else _POINTS)
        if points % 2 == 0:
            raise UsageError(f"--points: expected an odd number, so that the model is in the middle, got {points}")
        return Grid(points, self.radius, self.two)


@dataclass(frozen=True)
class SampleFlags(FlagGroup):
    """The examples and the random numbers."""

    examples: Annotated[int, typer.Option(min=1, help="Training examples of all clients, drawn by the seed.")] = 1000
    seed: Annotated[int, typer.Option(min=0, help="Seed of the examples and the directions.")] = 0
    data_root: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the task's data set.")] = None


@command
def landscape(
    context: Context,
    models: Annotated[
        list[Path],
        typer.Argument(metavar="MODEL...", help="Models as safetensors, or folders of `fl simulate --out`."),
    ],
    run: Annotated[Path, typer.Argument(metavar="RUN.TOML", help="The run's file: its task and \\[simulation].")],
    grid: GridFlags,
    sample: SampleFlags,
    *,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help=f"Write {CSV} and {PICTURE} here; the folder is made.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace older files.")] = False,
) -> None:
    """Show how flat saved models are: the loss along random directions, largest eigenvalue and trace of the Hessian.

    The directions have the norms of the model's filters, so that models of different scale can be compared. Of several
    models the curves are in one picture.
    """
    targets = [] if out is None else [Target(out / name, replace=force) for name in (CSV, PICTURE)]
    for target in targets:
        check_free(target, "choose another --out, or use --force")
    if out is not None:
        check_plotting("fl landscape --out")
    from fl_ops.simulate.measures.section import SharpnessSection

    section, points = SharpnessSection(examples=sample.examples, seed=sample.seed), grid.grid()
    landscapes = _landscapes(models, _prepared(run, sample), section, points)
    if out is not None:
        _write(
            targets,
            landscapes,
            points,
            f"{run.name}, {counted(sample.examples, 'training example')}, seed {sample.seed}",
        )
    facts = {"models": [_facts(one) for one in landscapes], "files": [str(target.path) for target in targets]}
    output.show(facts, _table(landscapes), context.as_json)


def _prepared(run: Path, sample: SampleFlags) -> PreparedRun:
    from fl_ops.simulate.clients import prepare
    from fl_ops.simulate.seeds import as_usage_errors
    from fl_ops.simulate.settings import SimulationConfig, read_simulation

    config = read_simulation(run)
    if sample.data_root is not None:
        options = {**config.run.task.options, "data_root": str(sample.data_root.resolve())}
        task = config.run.task.model_copy(update={"options": options})
        config = SimulationConfig(config.run.model_copy(update={"task": task}), config.simulation)
    with as_usage_errors():
        return prepare(config, config.run.seed)


def _landscapes(models: list[Path], run: PreparedRun, section: SharpnessSection, grid: Grid) -> list[Landscape]:
    from fl_ops.landscape.surface import Sample, labels_of
    from fl_ops.simulate.engines.client_work import one_thread
    from fl_ops.simulate.seeds import as_usage_errors

    with as_usage_errors(), one_thread():
        sample = Sample(run, section)
        losses = [sample.loss_of(path) for path in models]  # all are read before the work begins
        return [
            sample.landscape(label, loss, grid, _progress(label, len(grid.places)))
            for label, loss in zip(labels_of(models), losses, strict=True)
        ]


def _progress(label: str, points: int) -> Callable[[], None]:
    """Called after each point: shows on the terminal's stderr how many are done."""
    done = itertools.count(1)

    def advance() -> None:
        number = next(done)
        if sys.stderr.isatty():
            end = "\r" if number < points else "\n"
            print(f"{label}: {number} of {counted(points, 'point')}", end=end, file=sys.stderr, flush=True)

    return advance


def _write(targets: list[Target], landscapes: list[Landscape], grid: Grid, title: str) -> None:
    """Write both files. Raises OpsError."""
    import io

    from fl_ops.landscape.files import as_csv, draw

    picture = io.BytesIO()
    draw(landscapes, grid, title, picture)
    _make_folder(targets[0].path.parent)
    for target, content in zip(targets, (as_csv(landscapes, grid).encode(), picture.getvalue()), strict=True):
        with written_whole(target) as file:
            file.write(content)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(f"{folder} cannot be made: {error.strerror or error}") from error


def _facts(one: Landscape) -> dict[str, Any]:
    here = one.here
    return {"model": one.label, "loss": here.loss, "metrics": here.metrics, **one.sharpness}


def _table(landscapes: list[Landscape]) -> FittedTable:
    from fl_ops.simulate.measures.section import EIGENVALUE, RISE, TRACE, TRACE_ERROR

    names = sorted({name for one in landscapes for name in one.here.metrics})
    table = FittedTable(
        ("Model", ">Loss", *(f">{name.capitalize()}" for name in names), ">Largest eigenvalue", ">Trace", ">Rise"),
        optional=("Rise", *(name.capitalize() for name in reversed(names))),
    )
    for one in landscapes:
        of, metrics = one.sharpness, one.here.metrics
        table.add_row(
            one.label, value(one.here.loss), *(measured(metrics.get(name), name) for name in names),
            value(of[EIGENVALUE]), f"{value(of[TRACE])} ± {value(of[TRACE_ERROR])}", value(of[RISE]),
        )  # fmt: skip
    return table
