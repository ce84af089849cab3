"""Every kind of nonsense is refused with its own reason, and the model is what the good updates alone make."""

from __future__ import annotations

from random import Random

import pytest

from tests.chaos.arena import Arena
from tests.chaos.bad_updates import FAULTS
from tests.chaos.jobs import JOBS
from tests.chaos.plan import Plan
from tests.chaos.trial import Trial, play
from tests.integration.processes import HERE, Place


@pytest.fixture(scope="module")
def arena(tmp_path_factory):
    """One for all kinds: starting processes is what costs time."""
    with Place(tmp_path_factory.mktemp("bad-updates")) as place, Arena(place) as arena:
        yield arena


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_run_survives(arena, monkeypatch, name):
    """It is refused, no accepted list has it, and the replay of these lists makes the run's models."""
    monkeypatch.syspath_prepend(HERE)
    fault = FAULTS[name](Random(1))
    assert (fault.name, fault.takes_away) == (name, True)
    trial = Trial(Plan(1, JOBS["fedcm"], (fault,)))
    play(arena, trial)
    assert trial.happened == [name], trial.missed
