"""Every fault of the wire happens in a run of its own, which ends as if nothing had."""

from __future__ import annotations

from random import Random

import pytest

from tests.chaos.arena import Arena
from tests.chaos.jobs import JOBS
from tests.chaos.plan import Plan
from tests.chaos.trial import Trial, play
from tests.chaos.wire_faults import FAULTS
from tests.integration.processes import HERE, Place


@pytest.fixture(scope="module")
def arena(tmp_path_factory):
    """One for all faults: starting processes is what costs time."""
    with Place(tmp_path_factory.mktemp("wire-faults")) as place, Arena(place) as arena:
        yield arena


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_run_survives(arena, monkeypatch, name):
    """It happens, and the models are those of the undisturbed run."""
    monkeypatch.syspath_prepend(HERE)
    fault = FAULTS[name](Random(1))
    assert (fault.name, fault.takes_away) == (name, False)
    trial = Trial(Plan(1, JOBS["fedcm"], (fault,)))
    play(arena, trial)
    assert trial.happened == [name], trial.missed
