"""Tracks simulated runs: those of `fl simulate`, one for each seed, and the cells of `fl compare`."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from fl_common.units import counted
from fl_ops.compare.cells import Cell, CellResult, RoundRow
from fl_ops.compare.workers import Watch
from fl_ops.errors import OpsError, Refused
from fl_ops.simulate.output.results import AVERAGED_MODEL, MODEL, SeedResult
from fl_ops.simulate.reports import RoundResult
from fl_ops.simulate.seeds import Job, Report
from fl_ops.trackers.facts import EndFacts, RoundFacts, RunFacts, TrackedRun, dotted
from fl_ops.trackers.opening import Trackers
from fl_server.store.errors import file_digest
from fl_web.facts.rounds import grouped, is_of_clients, last_values, metric_groups
from protos.digests import digest_text

_DIGITS = 8
"""The digits of the digest in a run's name."""


class OpenRuns:
    """The runs that are tracked now, by a key of the caller; a context manager.

    The first failure of all is raised: a wrong address ends the command before hours of work. A later one does not end
    the work. Each further call tries again from what is there, and `check` raises what is left in the end.
    """

    def __init__(self, trackers: Trackers, note: Callable[[str], None]) -> None:
        """note: shows a line to people."""
        self._trackers, self._note = trackers, note
        self._open: dict[Any, tuple[ExitStack, Sequence[TrackedRun]]] = {}
        self._worked = False
        self._behind: dict[Any, OpsError] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for key in list(self._open):
            self._close(key)

    def write(self, key: Any, run: RunFacts, rounds: Iterable[RoundFacts]) -> None:
        """Write rounds of a run, which is opened if it is not open. Raises OpsError."""
        with self._noted(key):
            places = self._places(key, run)
            for facts in rounds:
                for place in places:
                    place.write(facts)

    def end(self, key: Any, run: RunFacts, end: EndFacts, models: Mapping[Path, str] | None = None) -> None:
        """The run has ended, and its rounds were given. models: files with the digests of their models."""
        with self._noted(key):
            for place in self._places(key, run):
                for path, digest in (models or {}).items():
                    if place.lacks_model(path.stem, digest):
                        place.add_model(path, digest)
                place.finish(end)
            self._behind.pop(key, None)
        self._close(key)

    def check(self) -> None:
        """Raises Refused if a run is not tracked completely."""
        for error in self._behind.values():
            raise Refused(f"{counted(len(self._behind), 'run')} not tracked completely: {error}") from error

    def _places(self, key: Any, run: RunFacts) -> Sequence[TrackedRun]:
        if key not in self._open:
            with ExitStack() as stack:
                places = stack.enter_context(self._trackers.opened(run))
                self._open[key] = stack.pop_all(), places
        return self._open[key][1]

    def _close(self, key: Any) -> None:
        if key in self._open:
            self._open.pop(key)[0].close()

    @contextmanager
    def _noted(self, key: Any) -> Iterator[None]:
        try:
            yield
        except OpsError as error:
            self._close(key)
            if not self._worked:
                raise
            if key not in self._behind:
                self._note(f"not tracked for now: {error}")
            self._behind[key] = error
        else:
            self._worked = True


class TrackedSeeds:
    """Gets the reports of `fl simulate`'s runs. Those of other things than rounds and ends pass by."""

    def __init__(self, runs: OpenRuns, jobs: Sequence[Job]) -> None:
        """Opens all runs. Raises OpsError."""
        self._runs = runs
        self._jobs = {job.seed: job for job in jobs}
        self._facts = {job.seed: _of_job(job) for job in jobs}
        for seed, facts in self._facts.items():
            runs.write(seed, facts, [])

    def __call__(self, report: Report) -> None:
        """A report of `simulate_all`."""
        now = time.time()
        if isinstance(report, SeedResult):
            facts = self._facts[report.seed]
            # All rounds: also those of an earlier process, and those that could not be written before.
            self._runs.write(report.seed, facts, [of_result(done, now) for done in report.rounds])
            end = EndFacts(report.status, report.reason, now)
            self._runs.end(report.seed, facts, end, self._models(report))
        elif isinstance(report, tuple) and isinstance(report[1], RoundResult):
            self._runs.write(report[0], self._facts[report[0]], [of_result(report[1], now)])

    def _models(self, result: SeedResult) -> dict[Path, str]:
        folder = self._jobs[result.seed].folder
        if folder is None or not result.rounds:
            return {}
        averaged = folder / AVERAGED_MODEL
        models = {averaged: digest_text(file_digest(averaged))} if averaged.exists() else {}
        return {folder / MODEL: result.model, **models}


class TrackedCells:
    """A `Watch` of the cells of `fl compare`, which passes everything on to another one."""

    def __init__(self, runs: OpenRuns, then: Watch) -> None:
        self._runs, self._then = runs, then

    def round_done(self, cell: Cell, row: RoundRow) -> None:
        """See Watch."""
        self._runs.write(cell.digest, _of_cell(cell), [of_row(row, time.time())])
        self._then.round_done(cell, row)

    def cell_done(self, cell: Cell, result: CellResult) -> None:
        """See Watch."""
        track_cell(self._runs, cell, result)
        self._then.cell_done(cell, result)


def track_cell(runs: OpenRuns, cell: Cell, result: CellResult) -> None:
    """Write a finished cell. Raises OpsError, if it is the first of all failures."""
    now, facts = time.time(), _of_cell(cell)
    runs.write(cell.digest, facts, [of_row(row, now) for row in result.rounds])
    state = "completed" if result.diverged is None else "failed"
    runs.end(cell.digest, facts, EndFacts(state, result.reason, now))


def of_result(done: RoundResult, at: float) -> RoundFacts:
    """A simulated round, under the names of a coordinator's."""
    cohort = {"accepted": len(done.accepted), "dropped": done.dropped, "attempts": done.attempts}
    values = _values(done, cohort, {"round": done.seconds, "simulated": done.simulated_s})
    return RoundFacts(done.round, at, {**values, **last_values(done.local_epochs)})


def of_row(row: RoundRow, at: float) -> RoundFacts:
    """A round of a cell, whose file has fewer values."""
    return RoundFacts(row.round, at, _values(row, {"accepted": row.accepted}, {"round": row.seconds}))


def _values(
    of: RoundResult | RoundRow, cohort: Mapping[str, float], seconds: Mapping[str, float | None]
) -> dict[str, float]:
    training, moved = {"loss": of.training_loss}, {"down": of.bytes_down, "up": of.bytes_up}
    groups = _metrics(of.metrics, of.measured)
    return grouped({**groups, "training": training, "bytes": moved, "seconds": seconds, "cohort": cohort})


def _metrics(metrics: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Evaluations, and what [simulation.measure] adds: its values over clients are among theirs."""
    groups = metric_groups({**metrics, **{name: value for name, value in measured.items() if is_of_clients(name)}})
    return {**groups, "flatness": {name: value for name, value in measured.items() if not is_of_clients(name)}}


def _of_job(job: Job) -> RunFacts:
    """A changed setting makes another run: its name has a digest of all settings."""
    config = job.config.run.model_copy(update={"seed": job.seed})
    settings = dotted(config.model_dump(mode="json", exclude_none=True))
    settings |= dotted(job.config.simulation.model_dump(mode="json", exclude_none=True), "simulation.")
    settings |= dotted(job.engine.arithmetic if job.engine.batched is not None else {}, "engine.")
    digest = _digest(settings)
    name = config.name or f"{config.task.name}-{config.algorithm.name}".replace(":", "-")
    return RunFacts(f"{name}-seed-{job.seed}-{digest[:_DIGITS]}", f"simulated, settings {digest}", settings)


def _of_cell(cell: Cell) -> RunFacts:
    own = {"method": cell.label, "split": cell.split, "stage": cell.stage}
    name = "-".join([*own.values(), "seed", str(cell.seed), cell.digest[:_DIGITS]])
    plain = "".join(letter if letter.isalnum() or letter in "-_.=" else "_" for letter in name)
    settings = {**own, **dotted(cell.settings["run"]), **dotted(cell.settings["simulation"], "simulation.")}
    return RunFacts(plain, f"cell {cell.digest}", settings)


def _digest(settings: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]
