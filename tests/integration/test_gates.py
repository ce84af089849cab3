"""Owners' gates from end to end: real daemons that read sensors in folders of their own, and a real coordinator."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest

from protos.fl.v1 import admin_pb2, coordinator_pb2
from tests.fl_client.gates.hardware import Hardware
from tests.integration.harness import PRESENT, Coordinator, Daemon, Fleet
from tests.integration.processes import Place, command, eventually

ONE = {"clients_per_round": 1, "min_clients": 1}
ALL = {"clients_per_round": 2, "min_clients": 3}
TWO = {"clients_per_round": 2, "min_clients": 2, "quorum": 2}


class GatedFleet(Fleet):
    """Daemons that train on mains only, each with hardware of its own."""

    def daemon(self, index, size):
        daemon = super().daemon(index, size)
        hardware = self.hardware(daemon.client_id)
        hardware.plug(True)
        gates = {"on_mains": True, "sysfs": str(hardware.root), "check_s": 0.05, "open_after_s": 0.1}
        shard = daemon.settings["shard"]
        return Daemon(self.place, self.server, daemon.client_id, shard=shard, gates=gates)

    def hardware(self, name):
        """A daemon's sensors."""
        return Hardware(self.place.folder / f"{name}-sys")

    def plug(self, name, plugged):
        """Put a plug in or pull it, and wait until the coordinator knows."""
        self.hardware(name).plug(plugged)
        eventually(lambda: self.server.client(name).availability.may_train == plugged, f"{name} says so")


@pytest.fixture(scope="module")
def gated(tmp_path_factory):
    """One fleet for all tests here."""
    with Place(tmp_path_factory.mktemp("gated")) as place:
        yield GatedFleet(place, 3)


@pytest.fixture
def fleet(gated):
    """Three daemons that are well, on mains, and without work."""
    for name in gated.daemons:
        gated.hardware(name).plug(True)
    gated.heal()
    for name in gated.daemons:
        gated.plug(name, True)
    yield gated
    gated.release()


def test_a_run_goes_on_without_the_device_whose_plug_is_pulled(fleet):
    """In the first round the plug of the third is pulled: the other two do all rounds, and operators see why."""
    fleet.hold()
    fleet.server.create("others", round=TWO, stop={"rounds": 5})
    cohort = fleet.server.until("others", lambda run: len(run.cohort) == 2, "it draws two").cohort
    (third,) = fleet.daemons.keys() - set(cohort)
    fleet.plug(third, False)
    fleet.release()
    fleet.server.completed("others")
    assert [each.accepted for each in fleet.server.rounds("others")] == [2] * 5
    assert not fleet[third].events("assignment", run="others")
    words = command(
        "clients",
        "list",
        "--server",
        str(fleet.server.settings["admin_listen"]),
        "--insecure",
        folder=fleet.place.folder,
    )
    assert "present, may not train (power)" in " ".join(words.stdout.split())


def test_a_run_waits_for_the_plug_and_says_so(fleet):
    """All three are needed: it waits, says for whom and why, over a restart too, and goes on when the plug is in."""
    fleet.plug("edge-1", False)
    fleet.server.create("waits", round=ALL)
    reason = (
        "2 of 3 clients are here that could be drawn; "
        "1 may not train by their own word (1 power), first edge-1: power: on battery"
    )
    fleet.server.until("waits", lambda run: run.reason == reason, "it says why it waits")
    fleet.server.kill()
    fleet.server.serve()
    fleet.attend()
    waiting = fleet.server.until("waits", lambda run: run.reason == reason, "it says so again")
    assert (waiting.state, waiting.eligible_clients) == (admin_pb2.RUN_STATE_WAITING, 2)
    fleet.plug("edge-1", True)
    fleet.server.completed("waits")
    assert not fleet["edge-1"].events("gate_sensor_failed")


def test_training_on_battery_is_given_up_and_another_takes_over(fleet):
    """The plug is pulled in mid-training: the third is drawn in its place, ten minutes before the deadline."""
    _, slow = fleet.half_delivered("given-up", round={**ALL, "quorum": 2}, stop={"rounds": 1})
    fleet.plug(slow.client_id, False)
    fleet.server.completed("given-up")
    (committed,) = fleet.server.rounds("given-up")
    assert (committed.accepted, committed.attempts) == (2, 2)
    told = slow.logged("work_failed", run="given-up")
    assert (told["reason"], told["message"]) == ("stopped", "the owner's gates are closed: power: on battery")
    assert fleet.server.client(slow.client_id).state == PRESENT


def test_who_gave_up_does_its_work_when_the_plug_is_in_again(fleet):
    """Nobody can replace it: the round waits, and the same daemon trains for it without registering anew."""
    third = fleet.daemons["edge-2"]
    fleet.plug("edge-2", False)
    quick, slow = fleet.half_delivered("back", round=TWO, stop={"rounds": 1})
    assert third not in (quick, slow)
    registered = len(slow.events("registered"))
    fleet.plug(slow.client_id, False)
    fleet.server.until("back", lambda run: "2 may not train by their own word (2 power)" in run.reason, "it waits")
    slow.hold.unlink()
    fleet.plug(slow.client_id, True)
    fleet.server.completed("back")
    assert (len(slow.events("assignment", run="back")), len(slow.events("registered"))) == (2, registered)


def hours(begin, end):
    """A window in UTC from and to so much from now."""
    now = datetime.now(UTC)
    return "-".join(f"{now + delta:%H:%M}" for delta in (begin, end))


def test_owners_hours(place):
    """Of two daemons only the one whose window is open now is drawn; the other says until when it is closed."""
    server = Coordinator(place).serve()
    opens = timedelta(hours=6)
    shut = {"windows": [hours(opens, timedelta(hours=7))], "timezone": "UTC"}
    awake = {"windows": [hours(timedelta(hours=-2), timedelta(hours=2))], "timezone": "UTC"}
    daemons = [Daemon(place, server, f"edge-{name}", gates=gates) for name, gates in (("a", shut), ("b", awake))]
    expected = datetime.now(UTC) + opens
    for daemon in daemons:
        daemon.start()
        eventually(lambda daemon=daemon: server.client(daemon.client_id).state == PRESENT, "it attends")
    server.completed(server.create("hours", round=ONE, stop={"rounds": 5}))
    assert not daemons[0].events("assignment")
    said = server.client("edge-a").availability
    assert said.reason == coordinator_pb2.UNAVAILABLE_REASON_TIME_WINDOW
    assert abs(said.until.seconds - expected.timestamp()) <= 60
    server.create("night", round={"clients_per_round": 2, "min_clients": 2})
    waiting = server.until("night", lambda run: run.reason, "it waits")
    assert (
        f"the first may again at {datetime.fromtimestamp(said.until.seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
        in waiting.reason
    )


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_window_opens_in_a_daemon_that_waits(place):
    """The next whole minute but one at the latest: a run that waits for the daemon starts then, and by itself."""
    server = Coordinator(place).serve()
    opens = datetime.fromtimestamp((time.time() + 15) // 60 * 60 + 60, UTC)
    window = f"{opens:%H:%M}-{opens + timedelta(hours=1):%H:%M}"
    daemon = Daemon(place, server, "edge-a", gates={"windows": [window], "timezone": "UTC", "check_s": 600}).start()
    daemon.logged("registered")
    run = server.create("opens", round=ONE, stop={"rounds": 1})
    assert "1 may not train" in server.until(run, lambda status: status.reason, "it waits").reason
    eventually(lambda: server.run(run).HasField("ended"), "it ends", within_s=120)
    assert server.rounds(run)[0].committed.seconds >= opens.timestamp()
    assert not daemon.events("assignment")[1:]
