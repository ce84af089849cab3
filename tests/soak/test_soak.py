"""A short soak with real processes: all its parts work, and nothing leaks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.processes.process import Workspace
from tests.soak.__main__ import plan_of
from tests.soak.plan import Plan
from tests.soak.soak import Soak, summary


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_short_soak_leaks_nothing(tmp_path: Path) -> None:
    """A minute and a half with six daemons: rounds are committed, daemons start and stop, and nothing leaks."""
    with Workspace(tmp_path) as workspace:
        soak = Soak(workspace, Plan(minutes=1.5, daemons=6, every_s=5.0), log=print)
        found = summary(soak, soak.run())
    assert json.dumps(found)
    assert found["faults"] == []
    assert found["rounds"] > soak.plan.rounds
    assert found["daemons"]["new"] >= 4
    assert found["operator_calls"]


def test_a_command_line_becomes_a_plan() -> None:
    """The defaults are half an hour and twenty daemons."""
    assert plan_of([]) == Plan()
    assert plan_of(["--minutes", "5", "--daemons", "8", "--seed", "3"]) == Plan(minutes=5, daemons=8, seed=3)


def test_a_soak_with_too_few_daemons_for_a_round_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A round needs three, and one of four may be stopped."""
    with pytest.raises(SystemExit):
        plan_of(["--daemons", "3"])
    assert "expected 4 or more, got 3" in capsys.readouterr().err
