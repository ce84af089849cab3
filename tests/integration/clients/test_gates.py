"""Owners' gates end to end: real daemons with sensors in their own folders, and a real coordinator."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from protos.fl.v1 import admin_pb2, coordinator_pb2
from tests.fl_client.gates.hardware import Hardware
from tests.processes.federation import PRESENT, Coordinator, Daemon, Fleet
from tests.processes.process import Workspace, eventually, run_fl

ONE = {"clients_per_round": 1, "min_clients": 1}
ALL = {"clients_per_round": 2, "min_clients": 3}
TWO = {"clients_per_round": 2, "min_clients": 2, "quorum": 2}


class GatedFleet(Fleet):
    """Daemons that train on mains only, each with its own hardware."""

    def daemon(self, index: int, size: int) -> Daemon:
        daemon = super().daemon(index, size)
        hardware = self.hardware(daemon.client_id)
        hardware.plug(True)
        gates = {"on_mains": True, "sysfs": str(hardware.root), "check_s": 0.05, "open_after_s": 0.1}
        shard = daemon.settings["shard"]
        return Daemon(self.workspace, self.server, daemon.client_id, shard=shard, gates=gates)

    def hardware(self, name: str) -> Hardware:
        """A daemon's sensors."""
        return Hardware(self.workspace.folder / f"{name}-sys")

    def plug(self, name: str, plugged: bool) -> None:
        """Plug a daemon in or out and wait until the coordinator knows."""
        self.hardware(name).plug(plugged)
        eventually(
            lambda: self.server.client(name).availability.may_train == plugged,
            f"the coordinator knows the plug of {name}",
        )


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatedFleet]:
    """The fleet of this module."""
    with Workspace(tmp_path_factory.mktemp("gated")) as workspace:
        yield GatedFleet(workspace, 3)


@pytest.fixture
def fleet(gated: GatedFleet) -> Iterator[GatedFleet]:
    """Three idle daemons on mains."""
    for name in gated.daemons:
        gated.hardware(name).plug(True)
    gated.reset()
    for name in gated.daemons:
        gated.plug(name, True)
    yield gated
    gated.release()


@pytest.mark.slow  # the tests below: another device takes over, and the reason is told
def test_a_run_continues_without_a_device_on_battery(fleet: GatedFleet) -> None:
    """The third is unplugged in the first round. The other two do all rounds, and operators see the reason."""
    fleet.hold()
    fleet.server.create("others", round=TWO, stop={"rounds": 5})
    cohort = fleet.server.until("others", lambda run: len(run.cohort) == 2, "it draws two").cohort
    (third,) = fleet.daemons.keys() - set(cohort)
    fleet.plug(third, False)
    fleet.release()
    fleet.server.completed("others")
    assert [each.accepted for each in fleet.server.rounds("others")] == [2] * 5
    assert not fleet[third].events("assignment", run="others")
    words = run_fl(
        "clients",
        "list",
        "--server",
        str(fleet.server.settings["admin_listen"]),
        "--insecure",
        folder=fleet.workspace.folder,
    )
    assert "present, may not train (power)" in " ".join(words.stdout.split())


@pytest.mark.slow
def test_a_run_waits_for_mains_with_a_reason(fleet: GatedFleet) -> None:
    """All three are needed. The run waits, names the client and the reason, also after a restart, and continues."""
    fleet.plug("edge-1", False)
    fleet.server.create("waits", round=ALL)
    reason = (
        "clients that could be drawn: 2 of 3 here; "
        "1 reports that it may not train (1 power), first edge-1: power: on battery; "
        "it is drawn again when the device reports that it may train"
    )
    fleet.server.until("waits", lambda run: run.reason == reason, "its reason names the gate")
    fleet.server.kill()
    fleet.server.serve()
    fleet.until_all_present()
    waiting = fleet.server.until("waits", lambda run: run.reason == reason, "its reason names the gate again")
    assert (waiting.state, waiting.eligible_clients) == (admin_pb2.RUN_STATE_WAITING, 2)
    fleet.plug("edge-1", True)
    fleet.server.completed("waits")
    assert not fleet["edge-1"].events("gate_sensor_failed")


def test_training_on_battery_is_given_up_and_another_takes_over(fleet: GatedFleet) -> None:
    """A daemon is unplugged during training. The third one replaces it, ten minutes before the deadline."""
    _, slow = fleet.half_delivered("given-up", round={**ALL, "quorum": 2}, stop={"rounds": 1})
    fleet.plug(slow.client_id, False)
    fleet.server.completed("given-up")
    (committed,) = fleet.server.rounds("given-up")
    assert (committed.accepted, committed.attempts) == (2, 2)
    failure = slow.logged("work_failed", run="given-up")
    assert (failure["reason"], failure["message"]) == ("stopped", "the owner's gates are closed: power: on battery")
    assert fleet.server.client(slow.client_id).state == PRESENT


def test_a_daemon_continues_its_work_on_mains(fleet: GatedFleet) -> None:
    """No client can replace it. The round waits, and the same daemon trains without a new registration."""
    third = fleet.daemons["edge-2"]
    fleet.plug("edge-2", False)
    quick, slow = fleet.half_delivered("back", round=TWO, stop={"rounds": 1})
    assert third not in (quick, slow)
    registered = len(slow.events("registered"))
    fleet.plug(slow.client_id, False)
    fleet.server.until("back", lambda run: "2 report that they may not train (2 power)" in run.reason, "it waits")
    slow.hold.unlink()
    fleet.plug(slow.client_id, True)
    fleet.server.completed("back")
    assert (len(slow.events("assignment", run="back")), len(slow.events("registered"))) == (2, registered)


def hours(begin: timedelta, end: timedelta) -> str:
    """A window in UTC with these offsets from now."""
    now = datetime.now(UTC)
    return "-".join(f"{now + delta:%H:%M}" for delta in (begin, end))


def test_owners_hours(workspace: Workspace) -> None:
    """Only the daemon with an open window is drawn. The other one reports when its window opens."""
    server = Coordinator(workspace).serve()
    opens = timedelta(hours=6)
    shut = {"windows": [hours(opens, timedelta(hours=7))], "timezone": "UTC"}
    awake = {"windows": [hours(timedelta(hours=-2), timedelta(hours=2))], "timezone": "UTC"}
    daemons = [Daemon(workspace, server, f"edge-{name}", gates=gates) for name, gates in (("a", shut), ("b", awake))]
    expected = datetime.now(UTC) + opens
    for daemon in daemons:
        daemon.start()
        server.until_present(daemon.client_id)
    server.completed(server.create("hours", round=ONE, stop={"rounds": 5}))
    assert not daemons[0].events("assignment")
    availability = server.client("edge-a").availability
    assert availability.reason == coordinator_pb2.UNAVAILABLE_REASON_TIME_WINDOW
    assert abs(availability.until.seconds - expected.timestamp()) <= 60
    server.create("night", round={"clients_per_round": 2, "min_clients": 2})
    waiting = server.until("night", lambda run: run.reason, "it waits")
    assert (
        f"the first may train again at {datetime.fromtimestamp(availability.until.seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
        in waiting.reason
    )


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_time_window_opens_for_a_waiting_daemon(workspace: Workspace) -> None:
    """A run that waits for the daemon starts by itself once the window opens, within two minutes."""
    server = Coordinator(workspace).serve()
    opens = datetime.fromtimestamp((time.time() + 15) // 60 * 60 + 60, UTC)
    window = f"{opens:%H:%M}-{opens + timedelta(hours=1):%H:%M}"
    daemon = Daemon(workspace, server, "edge-a", gates={"windows": [window], "timezone": "UTC", "check_s": 600}).start()
    daemon.logged("registered")
    run = server.create("opens", round=ONE, stop={"rounds": 1})
    assert "1 reports that it may not train" in server.until(run, lambda status: status.reason, "it waits").reason
    eventually(lambda: server.run(run).HasField("ended"), "it ends", within_s=120)
    assert server.rounds(run)[0].committed.seconds >= opens.timestamp()
    assert not daemon.events("assignment")[1:]
