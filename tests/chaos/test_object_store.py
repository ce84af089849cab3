"""SIGKILL at each write of a coordinator with an object store, on the same disk and each time on a new one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fl_server.settings.sections import ObjectsConfig
from fl_server.store.objects.bucket import Bucket
from tests.chaos.checks import ledger_of
from tests.chaos.cluster import ChaosCluster
from tests.chaos.faults import Death
from tests.chaos.jobs import JOBS
from tests.chaos.plan import Plan
from tests.chaos.points import AT_THE_END, EVERY_ROUND, IN_OBJECTS, REMOVALS, points
from tests.chaos.trial import Trial, run_trial
from tests.processes.process import Workspace, eventually
from tests.s3_server import S3Server

POINTS = list(points(*EVERY_ROUND, *IN_OBJECTS, *REMOVALS))
AT_ONCE = 4
"""Deaths in one run, one in each round: the undisturbed run has as many rounds."""
GROUPS = [POINTS[first : first + AT_ONCE] for first in range(0, len(POINTS), AT_ONCE)]


@pytest.fixture(scope="module", params=["folder", "s3"])
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosCluster]:
    """A cluster with an object store whose parts are small."""
    pytest.importorskip("obstore", reason="obstore is not installed: pip install '.[objects]'")
    with pytest.MonkeyPatch.context() as environment, Workspace(tmp_path_factory.mktemp("cluster")) as workspace:
        environment.setenv("CHAOS_PART_BYTES", str(96 << 10))
        environment.setenv("CHAOS_REMOVALS_EVERY_S", "0.2")
        settings: dict[str, Any] = {"storage": f"file://{tmp_path_factory.mktemp('objects')}"}
        if request.param == "s3":
            server: S3Server = request.getfixturevalue("s3")
            for name, value in server.environment.items():
                environment.setenv(name, value)
            settings = {"storage": f"s3://{server.new_bucket()}/a/b", "objects": {"endpoint": server.endpoint}}
        with ChaosCluster(workspace, settings) as cluster:
            yield cluster


@pytest.mark.slow
@pytest.mark.parametrize("new_disk", [False, True], ids=["same disk", "new disk"])
@pytest.mark.parametrize("group", range(len(GROUPS)))
def test_a_run_survives_deaths(stored: ChaosCluster, group: int, new_disk: bool) -> None:
    """The models are those of the undisturbed run, and the store has the objects that count and no others."""
    stored.server.new_disk = new_disk
    trial = Trial(Plan(1, JOBS["fedcm"], tuple(Death(point) for point in GROUPS[group])))
    run_trial(stored, trial)
    assert not [missed for missed in trial.missed if "removal" not in missed], trial.missed
    eventually(lambda: objects(stored) == counted(stored), "the store has what counts")


@pytest.mark.slow
def test_the_end_of_a_run_survives_deaths(stored: ChaosCluster) -> None:
    """At the end nothing of its rounds stays."""
    stored.server.new_disk = True
    for point in points(*AT_THE_END):
        run_trial(stored, Trial(Plan(1, JOBS["fedcm"], (Death(point),))))
    eventually(lambda: objects(stored) == counted(stored), "the store has what counts")
    assert not [key for key in objects(stored) if "/spool/" in key]


def objects(cluster: ChaosCluster) -> set[str]:
    """The keys of all objects."""
    settings = cluster.server.settings
    bucket = Bucket(settings["storage"], ObjectsConfig(**settings.get("objects", {})))
    return {key.partition("/")[2] for key, _ in bucket.keys("")}


def counted(cluster: ChaosCluster) -> set[str]:
    """The keys that the ledger counts."""
    with ledger_of(cluster) as ledger:
        return {key for file in ledger.stored_files() for key in file.keys}
