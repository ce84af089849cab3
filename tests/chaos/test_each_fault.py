"""Every fault of the wire and every kind of invalid update, each in its own run."""

from __future__ import annotations

from random import Random

import pytest

from tests.chaos import bad_updates, wire_faults
from tests.chaos.cluster import ChaosCluster
from tests.chaos.jobs import JOBS
from tests.chaos.plan import Plan
from tests.chaos.trial import Trial, run_trial

FAULTS = {**wire_faults.FAULTS, **bad_updates.FAULTS}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_run_survives(cluster: ChaosCluster, name: str) -> None:
    """The fault happens. The models are those of the undisturbed run, or of a replay where an update was refused."""
    fault = FAULTS[name](Random(1))
    assert (fault.name, fault.may_lose_update) == (name, name in bad_updates.FAULTS)
    trial = Trial(Plan(1, JOBS["fedcm"], (fault,)))
    run_trial(cluster, trial)
    assert trial.happened == [name], trial.missed
