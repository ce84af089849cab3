"""Faults of real processes: a few chosen plans. `make chaos` runs any number of seeds."""

from __future__ import annotations

from random import Random

import pytest

from tests.chaos.cluster import ChaosCluster
from tests.chaos.jobs import JOBS
from tests.chaos.plan import FAULTS, Plan, plan
from tests.chaos.trial import Trial, run_trial

SLOW = pytest.mark.slow
CHOSEN = [
    pytest.param("fedcm", "death behind checkpoint's rename", "kill half of the daemons", id="fedcm", marks=SLOW),
    pytest.param("scaffold", "death before outcomes", "cut up inside", id="scaffold", marks=SLOW),
    pytest.param("fedcm-goal", "update with a NaN", "freeze daemon", id="goal"),
]
"""They contain faults of every family: deaths, processes, links, updates."""


@pytest.mark.parametrize(("job", "first", "second"), CHOSEN)
def test_a_run_survives(cluster: ChaosCluster, job: str, first: str, second: str) -> None:
    """The faults happen, the run completes, and every condition holds."""
    draw = Random(7)
    trial = Trial(Plan(7, JOBS[job], (FAULTS[first](draw), FAULTS[second](draw))))
    run_trial(cluster, trial)
    assert trial.happened[:1] == [first], trial.missed
    assert trial.states_checked == JOBS[job].keeps_states


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_a_run_survives_the_faults_of_a_seed(cluster: ChaosCluster, seed: int) -> None:
    """The same with the faults of a seed. Some of them may find nothing to break."""
    trial = Trial(plan(seed))
    run_trial(cluster, trial)
    assert trial.happened or trial.missed
