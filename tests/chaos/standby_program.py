"""Seeds of a federation with a standby: `python -m tests.chaos --standby --seeds 50`. Each has four kills and a cut."""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
import traceback
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from random import Random

from protos.fl.v1 import admin_pb2
from tests import postgres_server, s3_server
from tests.chaos.fault import DidNotHappen
from tests.chaos.jobs import JOBS, Job
from tests.chaos.standby_cluster import StandbyCluster
from tests.chaos.standby_faults import CUTS, KILLS, Fault
from tests.chaos.worker_faults import CUTS_WITH_WORKERS, KILLS_WITH_WORKERS
from tests.processes.process import Workspace

KILLS_OF_A_SEED = 4
LONG_S = 30.0
ROUNDS = 12
"""Rounds of a run: it goes on while what has ended is started again, and each fault needs a round."""


@dataclass(frozen=True)
class StandbyPlan:
    """One run and its faults, one in each round."""

    seed: int
    job: Job
    faults: tuple[Fault, ...]


def standby_plan(seed: int, *, with_workers: bool = False) -> StandbyPlan:
    """The plan of a seed. Consecutive seeds go through all kills and all cuts in turn."""
    draw = Random(f"standby {seed}")
    kills, cuts = (KILLS_WITH_WORKERS, CUTS_WITH_WORKERS) if with_workers else (KILLS, CUTS)
    chosen = [kills[sorted(kills)[(seed * KILLS_OF_A_SEED + n) % len(kills)]] for n in range(KILLS_OF_A_SEED)]
    chosen.append(cuts[sorted(cuts)[seed % len(cuts)]])
    draw.shuffle(chosen)
    faults = [make(draw) for make in chosen]
    # The other coordinator goes on: after the longest fault the run may be over.
    faults.sort(key=lambda fault: getattr(fault, "for_s", 0.0) > LONG_S)
    return StandbyPlan(seed, JOBS[draw.choice(["fedcm", "scaffold"])], tuple(faults))


@dataclass
class StandbyTrial:
    """The result of a plan."""

    plan: StandbyPlan
    happened: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    takeovers: dict[str, list[float]] = field(default_factory=dict)
    """Seconds until another coordinator served, by the fault's name."""
    leases: list[float] = field(default_factory=list)
    """Seconds until it had the lease, after a kill."""
    seconds: float = 0.0


def run_standby_trial(cluster: StandbyCluster, trial: StandbyTrial) -> None:
    """Execute a plan and check all conditions. Raises AssertionError for one that does not hold."""
    plan, began = trial.plan, time.monotonic()
    undisturbed = cluster.undisturbed(plan.job, ROUNDS)
    name = f"seed-{plan.seed}-{int(began * 1000) % 10**9}"
    cluster.begin(plan.job, name, ROUNDS)
    for round_, fault in enumerate(plan.faults):
        cluster.server.until(name, partial(_has_reached, round_), f"round {round_} is under way")
        try:
            gone = fault.inject(cluster, name)
            trial.happened.append(fault.name)
        except DidNotHappen as why:
            trial.missed.append(f"{fault.name}: {why}")
            gone = None
        cluster.until_led()
        if gone is not None:
            trial.takeovers.setdefault(fault.name, []).append(_logged_at(cluster, "serving") - gone)
            if cluster.server.events("leading")[-1]["killed"]:
                trial.leases.append(_logged_at(cluster, "leading") - gone)
        cluster.settle()
    digests = cluster.server.digests(name)
    assert digests == undisturbed, f"expected the undisturbed run's models {undisturbed}, got {digests}"
    written, foreign = cluster.foreign_writes()
    assert written > 0
    assert foreign == 0, f"{foreign} of {written} writes came from a leader that was replaced"
    _check_trained_once(cluster, name)
    trial.seconds = time.monotonic() - began


def _has_reached(round_: int, run: admin_pb2.RunStatus) -> bool:
    return bool(run.HasField("ended") or run.rounds_done > round_ or run.cohort)


def _logged_at(cluster: StandbyCluster, event: str) -> float:
    """The Unix time of the leader's last line of an event."""
    return datetime.fromisoformat(cluster.server.events(event)[-1]["timestamp"]).timestamp()


def _check_trained_once(cluster: StandbyCluster, run: str) -> None:
    """No acknowledged update was lost: nobody was asked to train for a round a second time."""
    for daemon in cluster.daemons.values():
        times = Counter(event["round"] for event in daemon.events("trained", run=run))
        assert set(times.values()) <= {1}, f"{daemon.client_id} trained so often for each round: {dict(times)}"


class StandbyRunner:
    """Runs seeds on one cluster. After a failed seed it keeps the folder and starts a new cluster."""

    def __init__(self, store: str, *, with_workers: bool = False) -> None:
        self.trials: list[StandbyTrial] = []
        self.failed: dict[int, str] = {}
        self._store, self._with_workers, self._open = store, with_workers, ExitStack()
        self._cluster: StandbyCluster | None = None
        self._folder = Path()

    def seed(self, number: int) -> None:
        """Run one seed and print its result."""
        trial = StandbyTrial(standby_plan(number, with_workers=self._with_workers))
        faults = "; ".join(map(str, trial.plan.faults))
        try:
            run_standby_trial(self._started(), trial)
            print(f"seed {number:4}  {trial.seconds:5.1f} s  survived  {trial.plan.job.name}: {faults}", flush=True)
        except Exception as error:  # noqa: BLE001 - every error fails the seed
            why = str(error) if isinstance(error, AssertionError) else traceback.format_exc()
            self.failed[number] = why
            print(f"seed {number:4}  FAILED  {faults}\n    {why}\n    logs: {self._folder}", flush=True)
            self._open.close()
            self._open, self._cluster = ExitStack(), None
        self.trials.append(trial)
        for missed in trial.missed:
            print(f"           did not happen: {missed}", flush=True)

    def _started(self) -> StandbyCluster:
        if self._cluster is None:
            postgres = self._open.enter_context(postgres_server.running())
            s3 = self._open.enter_context(s3_server.running()) if self._store == "s3" else None
            self._folder = Path(tempfile.mkdtemp(prefix="impetus-standby-"))
            workspace = self._open.enter_context(Workspace(self._folder))
            cluster = StandbyCluster(workspace, postgres, s3, with_workers=self._with_workers)
            self._cluster = self._open.enter_context(cluster)
        return self._cluster

    def close(self) -> None:
        """End all processes."""
        self._open.close()
        if self._cluster is not None:
            shutil.rmtree(self._folder)


def run_seeds(first: int, count: int, store: str, *, with_workers: bool = False) -> int:
    """Run seeds and print a summary. Returns the exit code."""
    runner = StandbyRunner(store, with_workers=with_workers)
    try:
        for number in range(first, first + count):
            runner.seed(number)
    finally:
        runner.close()
    again = "python -m tests.chaos --standby" + (" --workers" if with_workers else "")
    print(json.dumps(summary(runner, again), indent=1))
    return 1 if runner.failed else 0


def summary(runner: StandbyRunner, again: str) -> dict[str, object]:
    """Counts of faults, the times of takeovers, and what failed."""
    happened = Counter(name for trial in runner.trials for name in trial.happened)
    times: dict[str, list[float]] = {}
    for trial in runner.trials:
        for name, seconds in trial.takeovers.items():
            kind = "death" if name.startswith("death") else name
            times.setdefault(kind, []).extend(seconds)
    takeovers = {name: _statistics(seconds) for name, seconds in sorted(times.items())}
    kills = sum(
        count
        for name, count in happened.items()
        if name.startswith(("death", "kill", "terminate", "worker's death", "SIG"))
    )
    return {
        "seeds": len(runner.trials),
        "failed": {f"{again} --seed {n}": why for n, why in runner.failed.items()},
        "kills": kills,
        "cuts": happened.total() - kills,
        "faults": dict(sorted(happened.items())),
        "takeovers": takeovers,
        "lease_after_a_kill": _statistics([seconds for trial in runner.trials for seconds in trial.leases]),
    }


def _statistics(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {"count": 0}
    return {
        "count": len(seconds),
        "median_s": round(statistics.median(seconds), 2),
        "longest_s": round(max(seconds), 2),
    }
