"""Real processes, and what goes wrong with them: a few chosen plans here, some hundred seeds by `make chaos`."""

from __future__ import annotations

from random import Random

import pytest

from tests.chaos.jobs import JOBS
from tests.chaos.plan import FAULTS, Plan, plan
from tests.chaos.trial import Trial, play

CHOSEN = [
    pytest.param("fedcm", "death behind checkpoint's rename", "kill half of the daemons", id="fedcm"),
    pytest.param("scaffold", "death before outcomes", "cut up inside", id="scaffold"),
    pytest.param("fedcm-goal", "update with a NaN", "freeze daemon", id="goal"),
]
"""Of every family something: deaths, processes, links, updates."""


@pytest.mark.parametrize(("job", "first", "second"), CHOSEN)
def test_a_run_survives(arena, job, first, second):
    """Faults happen, the run ends well, and everything that must hold of it does."""
    draw = Random(7)
    trial = Trial(Plan(7, JOBS[job], (FAULTS[first](draw), FAULTS[second](draw))))
    play(arena, trial)
    assert trial.happened[:1] == [first], trial.missed
    assert trial.states_checked == JOBS[job].keeps_states


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_a_run_survives_what_a_seed_brings(arena, seed):
    """As above, with what the seed draws; some of it may find nothing to break."""
    trial = Trial(plan(seed))
    play(arena, trial)
    assert trial.happened or trial.missed
