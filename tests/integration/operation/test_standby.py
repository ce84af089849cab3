"""A second coordinator on the same ledger and object store: it waits, takes over, and every model has the same bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.postgres_server import PostgresServer
from tests.processes.process import Workspace
from tests.processes.standby import Pair

pytest.importorskip("obstore", reason="obstore is not installed: pip install '.[objects]'")


@pytest.fixture(scope="module")
def shared_pair(tmp_path_factory: pytest.TempPathFactory, postgres: PostgresServer) -> Iterator[Pair]:
    """Two coordinators and three daemons."""
    store = tmp_path_factory.mktemp("objects")
    with Workspace(tmp_path_factory.mktemp("pair")) as workspace:
        yield Pair(workspace, 3, ledger=postgres.new_ledger(), storage=f"file://{store}")


@pytest.fixture
def pair(shared_pair: Pair) -> Iterator[Pair]:
    """The pair with a leader, a standby and idle daemons."""
    with shared_pair.lent() as lent:
        if lent.standby.exit_code is not None:
            lent.standby.stand_by()
        yield lent


def test_a_standby_takes_over_from_a_killed_leader(pair: Pair, undisturbed: list[str]) -> None:
    """With one of two updates admitted: it counts, its client does not train again, and the bits are the same."""
    quick, slow = pair.half_delivered("killed")
    pair.server.kill()
    pair.taken_over()
    status = pair.server.run("killed")
    assert (status.rounds_done, status.admitted) == (0, 1)
    slow.hold.unlink()
    assert undisturbed == pair.server.digests("killed")
    assert len(quick.events("trained", run="killed", round=0)) == 1
    assert pair.server.events("leading")[-1]["killed"]


def test_a_leader_that_is_stopped_hands_over(pair: Pair, undisturbed: list[str]) -> None:
    """SIGTERM ends it at once although an update is still made, and the standby continues the round."""
    _, slow = pair.half_delivered("drained")
    assert pair.server.terminate() == 0
    pair.taken_over()
    slow.hold.unlink()
    assert undisturbed == pair.server.digests("drained")
    assert not pair.server.events("leading")[-1]["killed"]
