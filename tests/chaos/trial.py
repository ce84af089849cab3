"""One seed, from its run's creation to the last check."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from fl_ops.errors import OpsError
from protos.fl.v1 import admin_pb2
from tests.chaos import checks
from tests.chaos.arena import Arena
from tests.chaos.fault import DidNotHappen
from tests.chaos.plan import Plan
from tests.integration.processes import eventually


@dataclass
class Trial:
    """What became of a plan."""

    plan: Plan
    happened: list[str] = field(default_factory=list)
    """Names of the faults that did."""
    missed: list[str] = field(default_factory=list)
    """Faults that found nothing to break, and why."""
    restarts: int = 0
    """Times that the coordinator was started again under the run."""
    states_checked: bool = False
    seconds: float = 0.0


def play(arena: Arena, trial: Trial) -> None:
    """Let a plan happen, and check. Raises AssertionError with what does not hold."""
    plan, job, began = trial.plan, trial.plan.job, time.monotonic()
    undisturbed = arena.undisturbed(job) if job.repeatable and not plan.takes_away else None
    arena.heal()
    before, name = checks.counted(arena), f"seed-{plan.seed}-{int(began * 1000) % 10**9}"
    arena.begin(job, name, rounds=plan.rounds, waits=plan.waits)
    try:
        _disturb(arena, trial)
        if job.keeps_states:
            trial.states_checked = _compare_states(arena)
        checks.check_completed(arena.server.ended(arena.run_id))
        if undisturbed is not None:
            checks.check_undisturbed(arena.server.digests(arena.run_id), undisturbed)
        else:
            checks.check_replay(arena)
        checks.check_ledger(arena, before)
        checks.check_history(arena, trial.restarts, takes_away=plan.takes_away)
        checks.check_spool(arena)
        checks.check_alive(arena)
    finally:
        trial.seconds = time.monotonic() - began


def _disturb(arena: Arena, trial: Trial) -> None:
    for round_, fault in enumerate(trial.plan.faults):
        lives = arena.server.lives
        try:
            if arena.until_round(round_).HasField("ended"):
                raise DidNotHappen("the run was over")
            fault.inject(arena, arena.run_id)
            trial.happened.append(fault.name)
        except DidNotHappen as why:
            trial.missed.append(f"{fault.name}: {why}")
        if arena.server.lives > lives and not arena.over():
            trial.restarts += arena.server.lives - lives
    checks.check_rounds_removed(arena)


def _compare_states(arena: Arena) -> bool:
    """Let the run stand still behind the next commit, and compare c with the c_i; False if it was over before."""
    run_id, done = arena.run_id, arena.server.run(arena.run_id).rounds_done
    arena.until_round(done + 1)
    try:
        with arena.server.admin() as admin:
            admin.pause_run(run_id)
    except OpsError:
        if arena.over():
            return False
        raise
    run = eventually(lambda: _still(arena), f"{run_id} stands still, or is over")
    if run.HasField("ended"):
        return False
    checked = checks.check_states(arena)
    with arena.server.admin() as admin:
        admin.resume_run(run_id)
    return checked


def _still(arena: Arena) -> admin_pb2.RunStatus | None:
    run = arena.server.run(arena.run_id)
    between = run.state == admin_pb2.RUN_STATE_PAUSED and run.phase == "selecting" and not run.cohort
    return run if between or run.HasField("ended") else None


def summed_up(trials: list[Trial]) -> dict[str, object]:
    """Faults by name, over all trials."""
    happened = Counter(name for trial in trials for name in trial.happened)
    missed = Counter(each.partition(":")[0] for trial in trials for each in trial.missed)
    restarts = sum(trial.restarts for trial in trials)
    return {"faults": dict(sorted(happened.items())), "missed": dict(sorted(missed.items())), "restarts": restarts}
