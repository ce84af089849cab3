"""`python -m tests.chaos --seeds 200`: runs seeds one after the other; exit code 1 if one failed."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import structlog
import torch

from tests.chaos.cluster import ChaosCluster
from tests.chaos.jobs import JOBS
from tests.chaos.plan import plan
from tests.chaos.standby_program import run_seeds
from tests.chaos.trial import Trial, fault_counts, run_trial
from tests.processes.process import HERE, Workspace


class ChaosRunner:
    """Runs seeds on one cluster. After a failed seed it keeps the folder and starts a new cluster."""

    def __init__(self, job: str = "") -> None:
        """job: of all runs; empty: the seeds draw them."""
        self._job = job
        self.trials: list[Trial] = []
        self.failed: dict[int, str] = {}
        self.survived = 0
        self._open = ExitStack()
        self._cluster: ChaosCluster | None = None
        self._folder = Path()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        if self._cluster is not None:
            shutil.rmtree(self._folder)

    def seed(self, number: int) -> None:
        """Run one seed and print its result."""
        trial = Trial(plan(number, self._job))
        try:
            run_trial(self._started(), trial)
        except Exception as error:  # noqa: BLE001 - every error fails the seed
            self._fail(trial, error)
            return
        finally:
            self.trials.append(trial)
        self.survived += 1
        states = ", states agree" if trial.states_checked else ""
        print(f"{_head(trial)}  survived{states}  {trial.plan}", flush=True)
        for missed in trial.missed:
            print(f"           did not happen: {missed}", flush=True)

    def _started(self) -> ChaosCluster:
        if self._cluster is None:
            self._folder = Path(tempfile.mkdtemp(prefix="impetus-chaos-"))
            self._cluster = self._open.enter_context(ChaosCluster(self._open.enter_context(Workspace(self._folder))))
        return self._cluster

    def _end(self) -> None:
        self._open.close()
        self._open = ExitStack()

    def _fail(self, trial: Trial, error: Exception) -> None:
        why = str(error) if isinstance(error, AssertionError) else traceback.format_exc()
        number = trial.plan.seed
        self.failed[number] = why
        print(f"{_head(trial)}  FAILED    {trial.plan}", flush=True)
        print(f"    {why}\n    logs: {self._folder}\n    again: {again(number, self._job)}", flush=True)
        self._end()
        self._cluster = None


def again(number: int, job: str = "") -> str:
    """The command that repeats a seed."""
    return f"python -m tests.chaos --seed {number}" + (f" --job {job}" if job else "")


def _head(trial: Trial) -> str:
    return f"seed {trial.plan.seed:4}  {len(trial.happened)} faults  {trial.seconds:5.1f} s"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description="Inject faults into a federation and check its guarantees."
    )
    parser.add_argument("--seeds", type=int, default=20, metavar="N", help="number of seeds to run")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="first seed")
    parser.add_argument("--seed", type=int, metavar="SEED", help="run only this seed")
    parser.add_argument("--job", choices=sorted(JOBS), default="", help="the only job; else the seeds draw them")
    parser.add_argument("--standby", action="store_true", help="two coordinators: kills and cuts of the leader")
    parser.add_argument("--store", choices=("s3", "folder"), default="s3", help="the object store with --standby")
    parser.add_argument("--workers", action="store_true", help="with --standby: two workers, and their faults too")
    options = parser.parse_args(arguments)
    first, count = (options.first, options.seeds) if options.seed is None else (options.seed, 1)
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("error"))
    sys.path.insert(0, str(HERE))  # folder of the task
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if options.standby:
        return run_seeds(first, count, options.store, with_workers=options.workers)
    with ChaosRunner(options.job) as runner:
        try:
            for number in range(first, first + count):
                runner.seed(number)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
    print(json.dumps(summary(runner), indent=1))
    return 0 if runner.survived == count else 1


def summary(runner: ChaosRunner) -> dict[str, object]:
    """Counts of injected faults and survived seeds, and the command that repeats each failed seed."""
    failed = {again(number): why for number, why in runner.failed.items()}
    return {
        "seeds": len(runner.trials),
        "survived": runner.survived,
        **fault_counts(runner.trials),
        "states_checked": sum(trial.states_checked for trial in runner.trials),
        "seconds": round(sum(trial.seconds for trial in runner.trials), 1),
        "failed": failed,
    }
