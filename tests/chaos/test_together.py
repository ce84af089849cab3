"""A kill before and behind the write of many verdicts in one transaction."""

from __future__ import annotations

from functools import partial
from itertools import count

import pytest

from fl_ops.errors import Unreachable
from tests.chaos.cluster import KillableCoordinator
from tests.chaos.points import TOGETHER, points
from tests.processes.federation import Daemon
from tests.processes.process import Workspace, eventually

SIZE = 4
ALL = {"clients_per_round": SIZE, "min_clients": SIZE, "quorum": SIZE}
ROUNDS = 4


class Eager(KillableCoordinator):
    """A coordinator that writes verdicts together as soon as two updates wait."""

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "CHAOS_MANY_WAITING": "2"}


@pytest.fixture
def cluster(workspace: Workspace) -> Eager:
    """Four daemons that deliver at about the same time."""
    server = Eager(workspace, {"limits": {"reattach_grace_s": 60.0}}).serve()
    for index in range(SIZE):
        shard = {"partition": {"method": "iid", "clients": SIZE, "seed": 1}, "index": index}
        Daemon(workspace, server, f"edge-{index}", shard=shard).start()
    for index in range(SIZE):
        server.until_present(f"edge-{index}")
    return server


def killed_or_over(server: Eager, run: str) -> bool:
    """Whether the coordinator has ended, or the run."""
    try:
        return server.exit_code is not None or server.run(run).HasField("ended")
    except Unreachable:
        return False


@pytest.mark.slow
def test_a_kill_at_the_write_of_many_verdicts_changes_no_bit(cluster: Eager) -> None:
    """The next coordinator has all of them or none, and the models are those of a run without a kill."""
    expected = cluster.digests(cluster.create("undisturbed", round=ALL, stop={"rounds": ROUNDS}))
    names = (f"killed-{number}" for number in count())
    for point in points(*TOGETHER):
        cluster.orders.kill_at(point, 1)
        run = ""
        while cluster.exit_code is None:  # two updates wait in most rounds; if in none, then in the next run
            run = cluster.create(next(names), round=ALL, stop={"rounds": ROUNDS})
            eventually(partial(killed_or_over, cluster, run), f"it dies {point}, or the run ends")
        assert cluster.orders.executed
        cluster.serve()
        assert cluster.digests(run) == expected
