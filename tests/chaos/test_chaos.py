"""Real processes, and what goes wrong with them: a few chosen plans here, some hundred seeds by `make chaos`."""

from __future__ import annotations

from random import Random

import pytest

from tests.chaos.arena import Arena
from tests.chaos.jobs import JOBS
from tests.chaos.plan import FAULTS, Plan, plan
from tests.chaos.trial import Trial, play
from tests.integration.processes import HERE, Place


@pytest.fixture(scope="module")
def arena(tmp_path_factory):
    """One for all plans: starting processes is what costs time."""
    with Place(tmp_path_factory.mktemp("chaos")) as place, Arena(place) as arena:
        yield arena


@pytest.fixture(autouse=True)
def _at_hand(monkeypatch):
    """A replay needs the daemons' task."""
    monkeypatch.syspath_prepend(HERE)


CHOSEN = [
    pytest.param("fedcm", "death behind checkpoint's rename", "kill half of the daemons", id="fedcm"),
    pytest.param("scaffold", "death before outcomes", "freeze daemon", id="scaffold"),
    pytest.param("fedcm-goal", "half of the daemons gone", "kill coordinator", id="goal"),
]


@pytest.mark.parametrize(("job", "first", "second"), CHOSEN)
def test_a_run_survives(arena, job, first, second):
    """Both faults happen, the run ends well, and everything that must hold of it does."""
    draw = Random(7)
    trial = Trial(Plan(7, JOBS[job], (FAULTS[first](draw), FAULTS[second](draw))))
    play(arena, trial)
    assert trial.happened == [first, second]
    assert trial.states_checked == JOBS[job].keeps_states


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_a_run_survives_what_a_seed_brings(arena, seed):
    """As above, with what the seed draws; some of it may find nothing to break."""
    trial = Trial(plan(seed))
    play(arena, trial)
    assert trial.happened or trial.missed
