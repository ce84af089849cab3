"""A rolling upgrade of coordinators and workers in the middle of a run: no round is lost, and no bit differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.postgres_server import PostgresServer
from tests.processes.federation import Daemon
from tests.processes.pods import Pods
from tests.processes.process import Workspace
from tests.s3_server import S3Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SIZE, ROUNDS = 4, 5


class Upgraded(Pods):
    """A run with two clients of four in each round, whose rounds end only when they may."""

    def begin(self, run: str) -> None:
        """Create the run."""
        self._run, self._slow = run, None
        self.hold()
        self.server.create(run, stop={"rounds": ROUNDS})

    _run: str
    _slow: Daemon | None

    def midway(self, round_: int) -> None:
        """Wait until one of the round's two updates is admitted. The other client trains until `go_on`."""
        cohort = self.server.until(self._run, lambda run: run.rounds_done == round_ and run.cohort, "it draws").cohort
        self.hold()
        # All but the one that went on have trained nothing since the round was drawn.
        slow = next(self[name] for name in cohort if self[name] is not self._slow)
        for name in cohort:
            if self[name] is not slow:
                self[name].hold.unlink()
        self.server.until(self._run, lambda run: run.admitted == 1, "one has delivered")
        self.hold()
        slow.logged("assignment", run=self._run, round=round_)
        self._slow = slow

    def go_on(self) -> None:
        """Let the round end."""
        assert self._slow is not None
        self._slow.hold.unlink()


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory, postgres: PostgresServer, s3: S3Server) -> Iterator[Upgraded]:
    """Two coordinators with PostgreSQL and S3, two workers, four daemons."""
    with Workspace(tmp_path_factory.mktemp("pods")) as workspace, pytest.MonkeyPatch.context() as patch:
        for name, value in s3.environment.items():
            patch.setenv(name, value)
        shared = {
            "ledger": postgres.new_ledger(),
            "storage": f"s3://{s3.new_bucket()}/impetus",
            "objects": {"endpoint": s3.endpoint, "retry_s": 2.0},
            "limits": {"reattach_grace_s": 120.0},
        }
        made = Upgraded(workspace, SIZE, 2, shared)
        yield made
        made.close()


@pytest.fixture(scope="module")
def expected(pods: Upgraded) -> list[str]:
    """Digests of the undisturbed run."""
    return pods.server.digests(pods.server.create("undisturbed", stop={"rounds": ROUNDS}))


def check(pods: Upgraded, run: str, expected: list[str]) -> None:
    """Every round is the undisturbed one, of the first attempt, and nobody trained for one twice."""
    assert pods.server.digests(run) == expected
    assert [(each.attempts, each.accepted) for each in pods.server.rounds(run)] == [(1, 2)] * ROUNDS
    for daemon in pods.daemons.values():
        times = Counter(event["round"] for event in daemon.events("trained", run=run))
        assert set(times.values()) <= {1}, f"{daemon.client_id} trained so often for each round: {dict(times)}"


def test_one_pod_after_the_other(pods: Upgraded, expected: list[str]) -> None:
    """SIGTERM in the middle of a round, then the next one: leader, both workers, and the standby that leads by then."""
    pods.begin("one-by-one")
    first, second = pods.server, next(each for each in pods.coordinators if each is not pods.server)
    for round_, old in enumerate((first, *pods.workers, second)):
        pods.midway(round_)
        pods.end(old, pods.go_on)
        if old in (first, second):
            pods.until_led()  # or the next one could lead
            pods.coordinator().stand_by()
        else:
            pods.worker().serve()
    assert pods.server not in (first, second)
    pods.release()
    check(pods, "one-by-one", expected)


def test_as_the_deployments_do(pods: Upgraded, expected: list[str]) -> None:
    """A worker ends when its successor is ready. Both coordinators end together when theirs stand by."""
    pods.begin("rollout")
    for round_, old in enumerate(list(pods.workers)):
        pods.midway(round_)
        pods.worker().serve()
        pods.end(old, pods.go_on)
    pods.midway(2)
    before = list(pods.coordinators)
    for _ in before:
        pods.coordinator().stand_by()
    standby = next(each for each in before if each is not pods.server)
    pods.end(pods.server, lambda: pods.end(standby, pods.go_on))
    pods.until_led()
    assert pods.server not in before
    pods.release()
    check(pods, "rollout", expected)
