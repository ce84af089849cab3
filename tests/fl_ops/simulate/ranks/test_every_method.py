"""Every method has the bits of one process in any number of ranks, also with encodings.

One start of the ranks runs all cases.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from fl_ops.simulate.engine_choice import SEQUENTIAL
from tests.fl_ops.simulate.ranks.every_method import CASES, Rounds, rounds_of
from tests.fl_ops.simulate.ranks.launch import Launches, standalone


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)], ids=lambda ranks: f"{ranks}-ranks")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Rounds]:
    """The rounds of each case by so many ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    with Launches() as launches:
        program = ("-m", "tests.fl_ops.simulate.ranks.every_method", "found.json")
        process = launches.start(folder, *standalone(request.param), *program)
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors
    rounds: Mapping[str, Rounds] = json.loads((folder / "found.json").read_text())
    return rounds


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_number_of_ranks_changes_no_bit(found: Mapping[str, Rounds], case: str) -> None:
    """Models, losses, metrics and bytes of three rounds are equal, and each round changes the model."""
    expected = rounds_of(case, SEQUENTIAL)
    assert len({digest for digest, *_ in expected}) == 3
    assert found[case] == expected
