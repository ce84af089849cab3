"""`fl methods` of one name: its kind, code and parameters."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fl_ops.commands.cli import app
from fl_ops.errors import Exit

MODULE = """\
import algorithms as fl


def blended(blend: fl.Share = 0.5) -> fl.Reducer:
    return fl.Reducer(reduce=lambda values, weights: values[0])
"""


def test_a_reducer_from_outside_shows_its_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No method has the name, so it is a reducer, with the parameters that its builder declares."""
    (tmp_path / "reducers_of_a_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    result = CliRunner().invoke(app, ["methods", "reducers_of_a_test:blended", "--json"])
    assert result.exit_code == Exit.OK, result.output
    facts = json.loads(result.output)
    assert facts["kind"] == "reducer"
    assert [(row["name"], row["default"]) for row in facts["parameters"]] == [("blend", 0.5)]
