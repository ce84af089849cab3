"""Places in which processes run, and the ends of their logs beside a failed test."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.integration import processes
from tests.integration.harness import Fleet
from tests.integration.processes import Place


@pytest.fixture(scope="session")
def shared_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One fleet for all tests of a worker: starting processes is what costs time."""
    with Place(tmp_path_factory.mktemp("shared")) as place:
        yield Fleet(place, 3)


@pytest.fixture
def fleet(shared_fleet: Fleet) -> Iterator[Fleet]:
    """A coordinator and three daemons, all well and without work, two of which are drawn for a round."""
    shared_fleet.heal()
    yield shared_fleet
    shared_fleet.release()


@pytest.fixture(scope="session")
def undisturbed(shared_fleet: Fleet) -> list[str]:
    """Digests of the rounds of the default run when nothing happens to it."""
    shared_fleet.heal()
    return shared_fleet.server.digests(shared_fleet.server.create("undisturbed"))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A folder for processes of one test."""
    with Place(tmp_path) as place:
        yield place


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test shows what its processes said last."""
    report = yield
    if report.failed:
        for process in (process for place in processes.ALL for process in place.processes):
            report.sections.append((f"{process.name}, exit code {process.exit_code}", process.tail()))
    return report
