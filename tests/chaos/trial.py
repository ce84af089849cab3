"""One seed: from the creation of its run to the last check."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from fl_ops.errors import OpsError
from protos.fl.v1 import admin_pb2
from tests.chaos import checks
from tests.chaos.cluster import ChaosCluster
from tests.chaos.fault import DidNotHappen
from tests.chaos.plan import Plan
from tests.processes.process import eventually


@dataclass
class Trial:
    """The result of a plan."""

    plan: Plan
    happened: list[str] = field(default_factory=list)
    """Names of the faults that happened."""
    missed: list[str] = field(default_factory=list)
    """Faults that found nothing to break, with the reason."""
    restarts: int = 0
    """How often the coordinator was restarted during the run."""
    states_checked: bool = False
    seconds: float = 0.0


def run_trial(cluster: ChaosCluster, trial: Trial) -> None:
    """Execute a plan and check all conditions. Raises AssertionError for a condition that does not hold."""
    plan, job, began = trial.plan, trial.plan.job, time.monotonic()
    undisturbed = cluster.undisturbed(job) if job.repeatable and not plan.may_lose_update else None
    cluster.reset()
    before, name = checks.counted(cluster), f"seed-{plan.seed}-{int(began * 1000) % 10**9}"
    cluster.begin(job, name, rounds=plan.rounds, waits=plan.waits)
    try:
        _inject_faults(cluster, trial)
        if job.keeps_states:
            trial.states_checked = _compare_states(cluster)
        checks.check_completed(cluster.server.ended(cluster.run_id))
        if undisturbed is not None:
            checks.check_undisturbed(cluster.server.digests(cluster.run_id), undisturbed)
        else:
            checks.check_replay(cluster)
        checks.check_ledger(cluster, before)
        checks.check_history(cluster, trial.restarts, may_lose_update=plan.may_lose_update)
        checks.check_spool(cluster)
        checks.check_alive(cluster)
    finally:
        trial.seconds = time.monotonic() - began


def _inject_faults(cluster: ChaosCluster, trial: Trial) -> None:
    for round_, fault in enumerate(trial.plan.faults):
        started = cluster.server.times_started
        try:
            if cluster.until_round(round_).HasField("ended"):
                raise DidNotHappen("the run was over")
            fault.inject(cluster, cluster.run_id)
            trial.happened.append(fault.name)
        except DidNotHappen as why:
            trial.missed.append(f"{fault.name}: {why}")
        if cluster.server.times_started > started and not cluster.over():
            trial.restarts += cluster.server.times_started - started
    checks.check_rounds_removed(cluster)


def _compare_states(cluster: ChaosCluster) -> bool:
    """Pause the run after the next commit and compare c with the c_i; False if the run ended before."""
    run_id, done = cluster.run_id, cluster.server.run(cluster.run_id).rounds_done
    cluster.until_round(done + 1)
    try:
        with cluster.server.admin() as admin:
            admin.runs.pause_run(run_id)
    except OpsError:
        if cluster.over():
            return False
        raise
    run = eventually(lambda: _paused_or_ended(cluster), f"{run_id} is paused between rounds or has ended")
    if run.HasField("ended"):
        return False
    checked = checks.check_states(cluster)
    with cluster.server.admin() as admin:
        admin.runs.resume_run(run_id)
    return checked


def _paused_or_ended(cluster: ChaosCluster) -> admin_pb2.RunStatus | None:
    run = cluster.server.run(cluster.run_id)
    between = run.state == admin_pb2.RUN_STATE_PAUSED and run.phase == "selecting" and not run.cohort
    return run if between or run.HasField("ended") else None


def fault_counts(trials: list[Trial]) -> dict[str, object]:
    """Faults by name, over all trials."""
    happened = Counter(name for trial in trials for name in trial.happened)
    missed = Counter(each.partition(":")[0] for trial in trials for each in trial.missed)
    restarts = sum(trial.restarts for trial in trials)
    return {"faults": dict(sorted(happened.items())), "missed": dict(sorted(missed.items())), "restarts": restarts}
