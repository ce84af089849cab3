"""A short fuzzing of all parsers; `make fuzz` does the same for minutes, with a live coordinator and a daemon."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.fuzz import hostile_answers
from tests.fuzz.all_parsers import all_parsers
from tests.fuzz.in_process import Tally, play, quiet, run_one
from tests.fuzz.live import campaign
from tests.fuzz.mutation import input_of, random_for, raw_of
from tests.fuzz.parser import Parser
from tests.processes.process import Workspace

INPUTS = 4000
SEED = 7


def test_no_parser_fails() -> None:
    """Some thousand changed inputs, the same ones every time."""
    with all_parsers() as parsers:
        tally = play(parsers, SEED, lambda tally: tally.total >= INPUTS)
    assert [f"{failure.parser}, input {failure.number}: {failure.error}" for failure in tally.failures] == []


def test_seeds_are_valid() -> None:
    """Each unchanged seed of the requests is accepted: changed ones then get past the first checks."""
    with all_parsers("requests") as parsers, quiet():
        refused = {
            parser.name
            for parser in parsers
            for seed in parser.seeds
            if parser.name.startswith("request.") and run_one(parser, raw_of(seed))[0] != "accepted"
        }
    assert refused == set()


def test_an_input_is_a_function_of_its_seed() -> None:
    """So a failure can be made again."""
    with all_parsers("requests") as parsers:
        for parser in parsers:
            once, again = (input_of(random_for(SEED, parser.name, 5), parser.seeds) for _ in range(2))
            assert once == again


def test_an_undeclared_exception_is_a_failure() -> None:
    """The fuzzer finds a parser that raises something else than it declares."""

    def call(raw: bytes) -> None:
        raise KeyError("x") if raw[:1] == b"a" else ValueError("y")

    parser = Parser("p", [b"aaaa"], call, (ValueError,))
    tally: Tally = play([parser], SEED, lambda tally: tally.total >= 64)
    assert [failure.error.strip().splitlines()[-1] for failure in tally.failures] == ["KeyError: 'x'"]
    assert tally.results["p ValueError"] > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_live_coordinator_withstands(workspace: Workspace) -> None:
    """A thousand changed calls of all methods and wrong frames, during honest runs."""
    result = campaign.play(
        campaign.FuzzedFederation(workspace, **campaign.SETTINGS), SEED, lambda calls, _: calls >= 1000
    )
    assert result.failures == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_daemon_withstands() -> None:
    """Some hundred changed events and answers, with a correct round after each fifty."""
    with tempfile.TemporaryDirectory(prefix="fuzz-daemon-") as folder:
        result = hostile_answers.play(Path(folder), SEED, lambda sent: sent >= 300)
    assert result.failures == []
