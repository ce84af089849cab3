"""Seeds with a standby: kills and cuts of the leader. `python -m tests.chaos --standby` runs many."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.chaos.standby_cluster import StandbyCluster
from tests.chaos.standby_faults import CUTS, KILLS, Cut, Death
from tests.chaos.standby_program import StandbyTrial, run_standby_trial, standby_plan
from tests.chaos.worker_faults import CUTS_WITH_WORKERS, KILLS_WITH_WORKERS, POINTS
from tests.postgres_server import PostgresServer
from tests.processes.process import Workspace

pytest.importorskip("obstore", reason="obstore is not installed: pip install '.[objects]'")


def test_fifty_seeds_have_every_fault() -> None:
    """200 kills at every point and 50 cuts of every way."""
    plans = [standby_plan(seed) for seed in range(50)]
    faults = [type(fault).__name__ for plan in plans for fault in plan.faults]
    assert len(faults) == 250
    points = {fault.point for plan in plans for fault in plan.faults if isinstance(fault, Death)}
    assert points == {name.removeprefix("death ") for name in KILLS if name.startswith("death")}
    ways = {(fault.way, fault.how) for plan in plans for fault in plan.faults if isinstance(fault, Cut)}
    assert len(ways) + 3 == len(CUTS)


def test_fifty_seeds_with_workers_have_every_fault() -> None:
    """Those of the leader that workers leave to it, and those of the workers."""
    faults = [fault for seed in range(50) for fault in standby_plan(seed, with_workers=True).faults]
    names = {fault.name for fault in faults}
    assert {f"worker's death {point}" for point in POINTS} <= names
    assert {f"worker without {way} ({how})" for way in ("coordinators", "store") for how in ("cut", "silence")} <= names
    assert len(names) == len(KILLS_WITH_WORKERS) + len(CUTS_WITH_WORKERS)
    assert not names & {f"death {point}" for point in POINTS if "object" not in point}


@pytest.fixture(scope="module", params=[False, True], ids=["", "workers"])
def pair(
    tmp_path_factory: pytest.TempPathFactory, postgres: PostgresServer, request: pytest.FixtureRequest
) -> Iterator[StandbyCluster]:
    """The cluster of all seeds of this file, with a real S3 server."""
    s3 = request.getfixturevalue("s3")
    with Workspace(tmp_path_factory.mktemp("pair")) as workspace:
        cluster = StandbyCluster(workspace, postgres, s3, with_workers=request.param)
        with cluster:
            yield cluster


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_seed_holds(pair: StandbyCluster, seed: int) -> None:
    """The undisturbed run's bits, no write of a leader that was replaced, and nobody trains twice for a round."""
    plan = standby_plan(seed, with_workers=bool(pair.workers))
    run_standby_trial(pair, StandbyTrial(replace(plan, faults=plan.faults[:3])))
