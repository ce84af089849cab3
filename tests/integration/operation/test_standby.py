"""A second coordinator on the same ledger and object store: it waits, takes over, and every model has the same bits."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fl_common.signatures import make_key
from protos.fl.v1 import admin_pb2
from tests.postgres_server import PostgresServer
from tests.processes.federation import Daemon
from tests.processes.packaged import add
from tests.processes.process import Workspace, eventually, run_fl, write_toml
from tests.processes.relay import Relay
from tests.processes.standby import Pair
from tests.processes.web_page import WebPage
from tests.processes.wheels import good_wheels, package, wheel

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


def test_a_standby_takes_over_from_a_killed_leader(pair: Pair, undisturbed: list[str], tmp_path: Path) -> None:
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
    check_shown_to_operators(pair, tmp_path)


def check_shown_to_operators(pair: Pair, folder: Path) -> None:
    """`fl whoami` and the page name the leader, since when, and who stands by."""
    pytest.importorskip("starlette", reason="the extra `web` is not installed")
    leader, address = f"impetus process {pair.server.pid} on host", str(pair.server.settings["admin_listen"])
    shown = run_fl("whoami", "--insecure", "--server", address, folder=folder).stdout
    assert re.search(rf"leader +{leader} \S+ since .*, epoch \d+; no standby waits", shown), shown
    pair.standby.stand_by()
    standby = f"impetus process {pair.standby.pid} on host"
    with WebPage(address, folder) as page:
        eventually(
            lambda: re.search(rf"{leader} \S+ since [^;]*; standby {standby}", page.get("/").text), "it is shown"
        )
    shown = run_fl("whoami", "--insecure", "--server", address, folder=folder).stdout
    assert re.search(rf"standby +{standby} \S+, (has all checkpoints|.* behind)", shown), shown


def test_a_leader_that_is_stopped_hands_over(pair: Pair, undisturbed: list[str]) -> None:
    """SIGTERM ends it at once although an update is still made, and the standby continues the round."""
    _, slow = pair.half_delivered("drained")
    assert pair.server.terminate() == 0
    pair.taken_over()
    slow.hold.unlink()
    assert undisturbed == pair.server.digests("drained")
    assert not pair.server.events("leading")[-1]["killed"]


@pytest.mark.slow
def test_a_leader_that_was_stopped_for_a_while_changes_nothing(pair: Pair, undisturbed: list[str]) -> None:
    """SIGSTOP until the standby serves, then SIGCONT: it ends with code 3, and started again it waits."""
    _, slow = pair.half_delivered("frozen")
    pair.server.signal(signal.SIGSTOP)
    before = pair.taken_over()
    before.signal(signal.SIGCONT)
    assert before.wait() == 3
    assert "changed nothing since" in before.errors()
    before.stand_by()
    slow.hold.unlink()
    assert undisturbed == pair.server.digests("frozen")


@pytest.mark.slow
def test_a_leader_that_hangs_in_a_write_changes_nothing(pair: Pair, undisturbed: list[str]) -> None:
    """The process is stopped while its updates arrive; what it has not acknowledged is sent again."""
    pair.hold()
    pair.server.create("hung")
    pair.server.until("hung", lambda run: len(run.cohort) == 2, "it draws two")
    pair.release()
    pair.server.signal(signal.SIGSTOP)
    before = pair.taken_over()
    before.signal(signal.SIGCONT)
    assert before.wait() == 3
    assert undisturbed == pair.server.digests("hung")


@pytest.mark.slow
def test_a_private_run_goes_on(pair: Pair) -> None:
    """The standby has the run's secret and the count of its charges from the object store."""
    privacy = {"unit": "client", "noise_multiplier": 0.5, "clip": 0.3, "delta": 0.01, "max_epsilon": 100.0}
    local = {"epochs": None, "steps": 4}
    round_ = {"sampling": "bernoulli", "rate": 0.7}
    pair.server.create("secret", privacy=privacy, local=local, population=3, round=round_, stop={"rounds": 6})
    pair.server.until("secret", lambda run: run.rounds_done >= 1, "it has a round")
    pair.server.kill()
    before = pair.taken_over()
    pair.server.completed("secret")
    key = Path("privacy", "secret.key")
    secrets = [Path(each.settings["state_dir"], key).read_bytes() for each in (before, pair.server)]
    assert secrets[0] == secrets[1]


class PackagedPair(Pair):
    """A pair whose daemons have data for a package, too."""

    def daemon(self, index: int, size: int) -> Daemon:
        """See Pair."""
        daemon = super().daemon(index, size)
        task, shard = daemon.settings.pop("task"), daemon.settings.pop("shard")
        packaged = {"name": "waves:Waves", "package": "waves", "data": "waves"}
        daemon.configure(
            tasks=[{**task, "shard": shard}, {**task, "shard": shard, **packaged}],
            policy=str(self.workspace.folder / "policy.toml"),
        )
        return daemon

    def until(self, version: int, state: str, **devices: int) -> None:
        """Wait until a version of the package is in this state, with so many devices in each of these."""

        def probe() -> bool:
            with self.server.admin() as admin:
                release = admin.models.get_release("waves", version, "package").release
            return (release.state, dict(release.devices)) == (state, devices)

        eventually(probe, f"version {version} is {state} with {devices}")


@pytest.mark.slow
def test_a_staged_package_goes_on(tmp_path: Path, postgres: PostgresServer) -> None:
    """The standby knows the stage, and has the file for the other devices from the object store."""
    key = make_key(tmp_path / "key.pem")
    write_toml(tmp_path / "policy.toml", {"packages": {"signers": [key.signer], "approval": False}})
    (tmp_path / "objects").mkdir()
    with Workspace(tmp_path) as workspace:
        pair = PackagedPair(workspace, 3, ledger=postgres.new_ledger(), storage=f"file://{tmp_path}/objects")
        add(pair.server, package(good_wheels(), key), tmp_path)
        pair.until(1, "released", installed=3)
        newer = [good_wheels()[0], wheel("ripples", {"ripples.py": "def same(value):\n    return value  # 2\n"})]
        add(pair.server, package(newer, key), tmp_path, stages=[0.5, 1.0])
        pair.until(2, "staged", installed=2)
        pair.server.kill()
        pair.taken_over()
        pair.until(2, "staged", installed=2)
        with pair.server.admin() as admin:
            admin.call(admin_pb2.AdvanceReleaseRequest(model="waves", kind="package"), admin_pb2.AdvanceReleaseResponse)
        pair.until(2, "released", installed=3)
        assert pair.server.history("waves")[-3:] == ["package_added", "package_advanced", "package_advanced"]


@pytest.fixture
def relayed(tmp_path: Path, postgres: PostgresServer) -> Iterator[tuple[Pair, Relay]]:
    """A pair whose first coordinator, which leads, reaches PostgreSQL through a relay."""
    url = postgres.new_ledger()
    with Relay(postgres.socket) as relay, Workspace(tmp_path) as workspace:
        (tmp_path / "objects").mkdir()
        own = {"one": {"ledger": postgres.over_tcp(url, relay.port)}}
        yield Pair(workspace, 3, own, ledger=url, storage=f"file://{tmp_path}/objects"), relay


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cut", "silence"])
def test_a_leader_without_its_database_is_replaced(
    relayed: tuple[Pair, Relay], undisturbed: list[str], how: str
) -> None:
    """Its connections are reset, or no byte passes any more. It ends, and the run goes on with the same bits."""
    pair, relay = relayed
    _, slow = pair.half_delivered("alone")
    getattr(relay, how)()
    before = pair.taken_over()
    assert before.wait() == 3
    slow.hold.unlink()
    assert undisturbed == pair.server.digests("alone")
    relay.heal()
    before.stand_by()


@pytest.mark.slow
def test_a_leader_alone_waits_for_its_database(relayed: tuple[Pair, Relay], undisturbed: list[str]) -> None:
    """Without a standby it stays the leader for longer than its lease, and goes on when the database is back."""
    pair, relay = relayed
    pair.standby.kill()
    eventually(lambda: b"fl_standbys 0.0" in pair.server.metrics(), "the standby is not counted on any more")
    _, slow = pair.half_delivered("patient")
    relay.cut()
    pair.server.logged("lease_not_renewed")
    time.sleep(12.0)  # more than the lease
    assert pair.server.exit_code is None
    relay.heal()
    slow.hold.unlink()
    assert undisturbed == pair.server.digests("patient")
