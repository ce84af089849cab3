"""Every fault of the wire and every kind of nonsense, in a run of its own."""

from __future__ import annotations

from random import Random

import pytest

from tests.chaos import bad_updates, wire_faults
from tests.chaos.jobs import JOBS
from tests.chaos.plan import Plan
from tests.chaos.trial import Trial, play

FAULTS = {**wire_faults.FAULTS, **bad_updates.FAULTS}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_run_survives(arena, name):
    """It happens; the models are the undisturbed run's, or, where an update was refused, what the good ones make."""
    fault = FAULTS[name](Random(1))
    assert (fault.name, fault.takes_away) == (name, name in bad_updates.FAULTS)
    trial = Trial(Plan(1, JOBS["fedcm"], (fault,)))
    play(arena, trial)
    assert trial.happened == [name], trial.missed
