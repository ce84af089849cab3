"""`fl task check`: what is wrong with a task, before a run uses it."""

from __future__ import annotations

import json

import pytest

from tests.fl_ops.conftest import Fl

ODD = "tests.processes.odd_task:Odd"


def test_a_task_in_order(fl: Fl) -> None:
    """Model, data, a step and an evaluation, without a coordinator; an extra state is a remark."""
    result = fl("task", "check", ODD, "--option", "kind=counted", "--json")
    assert result.exit_code == 0
    found = [(finding["check"], finding["result"]) for finding in json.loads(result.stdout)["findings"]]
    assert found == [
        ("task", "ok"),
        ("model", "ok"),
        ("model", "remark"),
        ("data", "ok"),
        ("labels", "remark"),
        ("step", "ok"),
        ("evaluation", "ok"),
        ("determinism", "ok"),
        ("small shards", "ok"),
        ("small shards", "ok"),
        ("export", "remark"),
    ]


@pytest.mark.parametrize(
    ("arguments", "failed"),
    [
        pytest.param(["tests.processes.odd_task:Nothing"], "FAIL   task: ", id="name"),
        pytest.param([ODD, "--option", "kind=lazy"], "FAIL   model: the task's model(): expected", id="lazy"),
        pytest.param([ODD, "--option", "kind=float8"], "FAIL   model: the task's model cannot be sent", id="float8"),
        pytest.param(["tests.processes.odd_task:Grown"], "FAIL   step: the model changes in training", id="growing"),
    ],
)
def test_the_first_fault_ends_the_check(fl: Fl, arguments: list[str], failed: str) -> None:
    """The exit code is 1, and the last line says what was expected."""
    result = fl("task", "check", *arguments)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1].startswith(failed)


def test_an_option_without_a_value_is_a_wrong_command_line(fl: Fl) -> None:
    """The exit code is 2."""
    result = fl("task", "check", ODD, "--option", "kind")
    assert (result.exit_code, "expected KEY=VALUE, got 'kind'" in result.stderr) == (2, True)
