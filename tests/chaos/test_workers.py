"""SIGKILL at each write of a worker, and of a coordinator whose bytes workers move."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from fl_ops.errors import Unreachable
from fl_server.worker.app import COPIES
from tests.chaos.points import EVERY_ROUND, OF_WORKERS, KillOrders, order_path, points
from tests.processes.federation import Coordinator, Daemon
from tests.processes.process import Process, Workspace, eventually
from tests.processes.workers import Worker, section

PROGRAM = "tests.chaos.server"
BYTES = {"part file", "chunk", "chunk's note", "seal", "resource's copy"}
"""Writes of the worker; the others are the coordinator's."""
POINTS = points(*EVERY_ROUND, *OF_WORKERS)
IN_WORKER = [name for name, write in POINTS.items() if write.name in BYTES]
IN_COORDINATOR = [name for name, write in POINTS.items() if write.name not in BYTES]


class Site:
    """A coordinator and a worker that kill themselves when they are told, and three daemons."""

    def __init__(self, workspace: Workspace) -> None:
        self.server = Coordinator(workspace, settings={"workers": section()})
        self.server._module = PROGRAM
        self.server.serve()
        self.worker = Worker(workspace, self.server, "worker", program=PROGRAM).serve()
        for index in range(3):
            shard = {"partition": {"method": "iid", "clients": 3, "seed": 1}, "index": index}
            Daemon(workspace, self.server, f"edge-{index}", shard=shard).start()
        self.server.until_present("edge-0", "edge-1", "edge-2")
        self.undisturbed = self.server.digests(self.server.create("undisturbed"))

    def digests_with_a_death(self, run: str, victim: Process, point: str, nth: int) -> list[str]:
        """Digests of a run in which a process dies at a point, and is started again."""
        if "copy" in point:  # the models of the runs before are the same, and so are the copies of them
            self.worker.kill()
            shutil.rmtree(Path(self.server.settings["state_dir"]) / COPIES)
            self.worker.serve()
        orders = KillOrders(order_path(victim.config))
        orders.kill_at(point, nth)
        with suppress(Unreachable):  # the first writes of a run may come before the answer
            self.server.create(run)
        eventually(lambda: orders.executed, f"it dies {point}")
        victim.wait()
        if victim is self.server:
            self.server.serve()
        else:
            victim.start()
        return self.server.digests(run)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The processes of all tests."""
    with Workspace(tmp_path_factory.mktemp("site")) as workspace:
        yield Site(workspace)


@pytest.mark.slow
@pytest.mark.parametrize("point", IN_WORKER)
def test_a_worker_dies_at_a_write(site: Site, point: str) -> None:
    """In the second upload of a round. The models are those of the undisturbed run."""
    nth = 1 if "copy" in point else 2
    run = point.replace(" ", "-").replace("'", "")
    assert site.digests_with_a_death(f"w-{run}", site.worker, point, nth) == site.undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("point", IN_COORDINATOR)
def test_the_coordinator_dies_at_a_write(site: Site, point: str) -> None:
    """The worker stays, and what it has received counts."""
    first = "checkpoint" in point  # that of the first model, while the run is created
    nth = 2 if POINTS[point].times > 1 or first else 1
    run = point.replace(" ", "-").replace("'", "")
    assert site.digests_with_a_death(f"c-{run}", site.server, point, nth) == site.undisturbed
