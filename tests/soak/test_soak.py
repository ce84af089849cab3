"""A short soak with real processes: all its parts work, and nothing leaks in it."""

from __future__ import annotations

import json

import pytest

from tests.integration.processes import Place
from tests.soak.__main__ import plan_of
from tests.soak.plan import Plan
from tests.soak.soak import Soak, summary


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_short_soak_leaks_nothing(tmp_path):
    """A minute and a half with six daemons: rounds are done, daemons come and go, and in the end all is let go of."""
    with Place(tmp_path) as place:
        soak = Soak(place, Plan(minutes=1.5, daemons=6, every_s=5.0), say=print)
        found = summary(soak, soak.run())
    assert json.dumps(found)
    assert found["faults"] == []
    assert found["rounds"] > soak.plan.rounds
    assert found["daemons"]["came new"] >= 4
    assert found["operator_calls"]


def test_a_command_line_becomes_a_plan():
    """What is not said stays as it is: half an hour, twenty daemons."""
    assert plan_of([]) == Plan()
    assert plan_of(["--minutes", "5", "--daemons", "8", "--seed", "3"]) == Plan(minutes=5, daemons=8, seed=3)


def test_a_soak_with_too_few_daemons_for_a_round_is_refused(capsys):
    """Three are a round's least, and one of four may be gone."""
    with pytest.raises(SystemExit):
        plan_of(["--daemons", "3"])
    assert "expected 4 or more, got 3" in capsys.readouterr().err
