"""Who is registered and who is here, over lost streams, restarts and a ledger that is away."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from structlog.testing import capture_logs

from fl_server import fleet as fleet_module
from fl_server.errors import Fenced, Forbidden, InvalidInput, NoCommonProtocol, NoSuchRun, NotNow, UnknownSessionError
from fl_server.identity import Identity, caller
from fl_server.registration import common_protocol
from fl_server.store.base import StoreAway
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import ExchangeKey
from tests.fl_server.devices import Device
from tests.fl_server.fleet_looks import eligible, history, without_a_ledger
from tests.fl_server.harness import World, until


class Clock:
    """Time that a test moves; the other clock goes as ever."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(fleet_module, "time", SimpleNamespace(monotonic=lambda: self.now, time=time.time))


@pytest.fixture
def clock(monkeypatch):
    """The fleet's clock."""
    return Clock(monkeypatch)


@pytest.fixture
async def world(tmp_path):
    """A coordinator without clients, that waits 20 s for those who left."""
    async with World(tmp_path, reattach_grace_s=20.0, max_clients=3) as world:
        yield world


async def test_a_storm_is_looked_at_once(world):
    """A hundred changes in one turn of the loop are one look at everybody, and the last of them is seen by it."""
    await Device("a").come(world)
    looks = []
    world.fleet.listener = SimpleNamespace(
        fleet_changed=lambda: looks.append(world.fleet.workforce.availability("a").detail),
        client_gone=lambda *_: None,
        client_attached=lambda _: None,
    )
    await until(lambda: world.fleet.told, "everybody is told")
    looks.clear()
    for index in range(100):
        world.fleet.workforce.set_availability("a", pb.Availability(may_train=False, detail=str(index)))
    assert not looks
    await until(lambda: world.fleet.told, "everybody is told")
    assert looks == ["99"]


async def test_who_attends_is_present(world):
    """Registering alone is not being here."""
    a = Device("a")
    answer = await world.service.Register(a.registration(), None)
    assert (answer.protocol, answer.coordinator_id) == (1, world.store.coordinator_id)
    assert (world.fleet.present(), world.fleet.state("a")) == ((), "lost")
    await a.come(world)
    assert (world.fleet.present(), world.fleet.state("a"), eligible(world)) == (("a",), "present", ("a",))
    assert history(world) == ["client_registered", "client_back"]
    assert world.metric("fl_clients", state="present") == 1


@pytest.mark.parametrize(
    ("field", "said", "words"),
    [
        ("labels", {str(at): "" for at in range(65)}, "labels: expected 64 at most, got 65"),
        ("labels", {"site": "x" * 257}, "labels: expected 256 characters at most, got 257"),
        ("labels", {"x" * 257: ""}, "labels: expected 256 characters at most, got 257"),
        ("tasks", [pb.TaskOffer(name="t")] * 65, "tasks: expected 64 at most, got 65"),
        ("tasks", [pb.TaskOffer(name="t" * 257)], "tasks: expected 256 characters at most, got 257"),
        ("software", "x" * 5_000_000, "software: expected 256 characters at most, got 5000000"),
        ("device", pb.Device(name="x" * 257), "device: expected 256 characters at most, got 257"),
        ("availability", pb.Availability(detail="x" * 257), "availability: expected 256 characters at most, got 257"),
        (
            "availability",
            pb.Availability(until=Timestamp(seconds=1 << 60)),
            "availability.until: expected a time up to the year 9999, got 1152921504606846976",
        ),
        ("pending", [ExchangeKey(run_id="r")] * 1001, "pending: expected 1000 at most, got 1001"),
        ("states", [pb.HeldState(run_id="r")] * 1001, "states: expected 1000 at most, got 1001"),
    ],
)
async def test_who_says_too_much_is_refused(world, field, said, words):
    """Before anything of it is kept."""
    with pytest.raises(InvalidInput, match=words):
        await world.service.Register(Device("a").registration(**{field: said}), None)
    assert world.store.clients() == []


async def test_an_endless_name_makes_a_short_answer(world):
    """What was sent is shown as far as fits into a status."""
    with pytest.raises(InvalidInput) as refused:
        await world.service.Register(Device("a").registration(client_id="x" * 1_000_000), None)
    with pytest.raises(NoSuchRun) as unknown:
        world.coordinator.run("x" * 1_000_000)
    assert len(str(refused.value)) + len(refused.value.detail.came) < 3000
    assert len(str(unknown.value)) + len(unknown.value.detail.run_id) < 3000


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"failures": [pb.WorkFailure()] * 65}, "failures: expected 64 at most, got 65"),
        ({"availability": pb.Availability(detail="x" * 257)}, "availability: expected 256 characters at most, got 257"),
        ({"availability": pb.Availability(until=Timestamp(seconds=-1))}, "availability.until: expected a time up to"),
    ],
)
async def test_who_reports_too_much_is_refused(world, said, words):
    """Failures are looked at one by one, and a word on availability is kept, logged and shown."""
    a = await Device("a").come(world)
    with pytest.raises(InvalidInput, match=words):
        await world.service.ReportStatus(pb.ReportStatusRequest(session_id=a.session, **said), None)
    assert eligible(world) == ("a",)


async def test_a_stream_that_is_lost_is_waited_for(world, clock):
    """Inside the grace a client is suspect and counts as here; behind it, it is lost: ledger and history know."""
    a = await Device("a").come(world)
    gone = []
    world.fleet.listener = SimpleNamespace(
        client_gone=lambda *args: gone.append(args), fleet_changed=lambda: None, client_attached=lambda _: None
    )
    await a.leave()
    clock.now += 19.9
    world.fleet.tick()
    assert (world.fleet.state("a"), eligible(world), gone) == ("suspect", ("a",), [])
    await until(lambda: world.metric("fl_clients", state="suspect") == 1, "it is counted")
    clock.now += 0.1
    world.fleet.tick()
    assert (world.fleet.state("a"), eligible(world), gone) == ("lost", (), [("a", "lost")])
    await until(lambda: not world.store.clients()[0].present, "it is written down")
    await a.come(world)
    assert history(world) == ["client_registered", "client_lost", "client_back"]


async def test_who_was_lost_while_the_ledger_was_away_is_not_waited_for(world, clock, monkeypatch):
    """That it was lost is written once it can be; a restart need not wait for it."""
    a = await Device("a").come(world)
    await a.leave()
    with monkeypatch.context() as patch, capture_logs() as logs:
        without_a_ledger(patch, world)
        clock.now += 20
        world.fleet.tick()
        await until(lambda: [log for log in logs if log["event"] == "presence_not_written"], "it is tried")
        assert world.store.clients()[0].present
    await until(lambda: not world.store.clients()[0].present, "it is written down")


async def test_who_came_back_while_the_ledger_was_away_is_present(world, clock, monkeypatch):
    """What was to be written of its loss is not true any more."""
    a = await Device("a").come(world)
    await a.leave()
    with monkeypatch.context() as patch:
        without_a_ledger(patch, world)
        clock.now += 20
        world.fleet.tick()
        await asyncio.sleep(0)  # the first try
    await a.come(world)
    await asyncio.gather(*fleet_module._background)
    assert world.store.clients()[0].present


async def test_presence_that_could_not_be_written_is_written_at_the_next_try(world, monkeypatch):
    """A client that attached while the ledger was away is told so; a restart waits for it once it has come again."""
    a = Device("a")
    a.session = (await world.service.Register(a.registration(), None)).session_id
    with monkeypatch.context() as patch:
        without_a_ledger(patch, world)
        with pytest.raises(StoreAway):
            await a._attend(world)
    a.stream = world.spawn(a._attend(world))
    await until(lambda: a.told("attached"), "it attends in the same session")
    assert world.store.clients()[0].present


async def test_who_comes_back_inside_the_grace_was_never_away(world, clock):
    """In the same session, and nobody is told that it is gone."""
    a = await Device("a").come(world)
    await a.leave()
    a.stream = world.spawn(a._attend(world))
    await until(lambda: world.fleet.attached("a"), "it is back")
    clock.now += 100
    world.fleet.tick()
    assert world.fleet.state("a") == "present"


async def test_a_restart_waits_for_who_was_here(tmp_path, clock):
    """Nothing is settled before the last of them is back or was waited for; availability is asked anew."""
    async with World(tmp_path) as world:
        for name in "abc":
            await Device(name).come(world)
        await world.operators.ban("c", "smoke", "admin")
        await world.service.Register(Device("never-attended").registration(), None)
    async with World(tmp_path, reattach_grace_s=20.0) as world:
        assert (world.fleet.settled, world.fleet.present()) == (False, ("a", "b"))
        await Device("b").come(world)
        assert not world.fleet.settled
        clock.now += 20
        world.fleet.tick()
        assert (world.fleet.settled, world.fleet.present()) == (True, ("b",))


async def test_a_second_daemon_of_an_identity_fences_the_first(world):
    """The first one's stream ends with the reason, its session is void, and the history has a line."""
    first = await Device("a").come(world)
    second = Device("a")
    registration = second.registration(instance_id="another")
    second.registration = lambda: registration
    await second.come(world)
    with pytest.raises(Fenced, match="another daemon uses the same identity: end one of the two"):
        await first.stream
    with pytest.raises(UnknownSessionError):
        world.fleet.session(first.session)
    assert (world.fleet.state("a"), world.fleet.attached("a")) == ("present", True)
    assert history(world) == ["client_registered", "client_fenced"]


async def test_attending_twice_in_a_session_ends_the_older_stream(world):
    """Quietly, and the client stays present."""
    a = await Device("a").come(world)
    older = a.stream
    a.stream = world.spawn(a._attend(world))
    await older
    assert world.fleet.state("a") == "present"


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"client_id": "a b"}, InvalidInput, "client_id: expected 1 to 64 of A-Z a-z 0-9 . _ -, got a b"),
        ({"client_id": "../x"}, InvalidInput, "client_id: expected 1 to 64"),
        ({"client_id": ""}, InvalidInput, "client_id: expected 1 to 64"),
        ({"tasks": []}, InvalidInput, "tasks: expected at least one task"),
        ({"protocol": {"min": 2, "max": 3}}, NoCommonProtocol, "upgrade the coordinator"),
        ({"protocol": {}}, NoCommonProtocol, "upgrade the client"),
    ],
)
async def test_registrations_that_are_refused(world, changes, error, words):
    """Each says what is wrong with it, and leaves nothing behind."""
    with pytest.raises(error, match=words):
        await world.service.Register(Device("a").registration(**changes), None)
    assert world.store.clients() == []


@pytest.mark.parametrize(("low", "high", "spoken"), [(1, 1, 1), (0, 9, 1), (1, 7, 1)])
def test_the_highest_common_protocol_is_spoken(low, high, spoken):
    """One version overlaps is enough."""
    assert common_protocol(pb.ProtocolRange(min=low, max=high)) == spoken


def test_a_range_that_is_none_is_refused():
    """Its ends are the wrong way round."""
    with pytest.raises(NoCommonProtocol):
        common_protocol(pb.ProtocolRange(min=2, max=1))


async def test_a_certificate_is_for_its_own_name(world):
    """Another client's name and another client's session are refused."""
    a = await Device("a").come(world)
    token = caller.set(Identity("client", "b"))
    with pytest.raises(Forbidden, match="client:b is not allowed"):
        world.fleet.session(a.session)
    with pytest.raises(Forbidden, match="client:b is not allowed"):
        await world.service.Register(Device("a").registration(), None)
    caller.reset(token)


async def test_a_full_coordinator_says_not_now(world):
    """One more than the limit is turned away; who is in already may register again."""
    for name in "abc":
        await Device(name).come(world)
    with pytest.raises(NotNow, match="3 clients are connected, which is the limit here; try again in 60 s"):
        await Device("d").come(world)
    await Device("a").come(world)


async def test_who_comes_in_a_storm_gets_a_time_to_come_again(tmp_path, monkeypatch):
    """With one registration a second and two at once, the third is told to wait, and nothing is kept of it."""
    monkeypatch.setattr(fleet_module, "HOLD_S", 0.0)
    async with World(tmp_path, registrations_per_s=1.0) as world:
        for name in "ab":
            await Device(name).come(world)
        with pytest.raises(NotNow, match="many clients come at once") as refused:
            await Device("c").come(world)
        assert 0 < refused.value.detail.wait.ToTimedelta().total_seconds() <= 1
        assert world.fleet.known("c") is None


async def test_whose_time_is_near_waits_in_the_call(tmp_path):
    """The fifth of a storm, its time half a second away: it is let in without coming again."""
    async with World(tmp_path, registrations_per_s=2.0) as world:
        for name in "abcde":
            await Device(name).come(world)
        assert world.fleet.attached("e")


async def test_who_is_banned_while_it_waits_is_not_let_in(tmp_path):
    """What was decided in the meantime holds."""
    async with World(tmp_path, registrations_per_s=1.0) as world:
        for name in "ab":
            await Device(name).come(world)
        waiting = asyncio.ensure_future(Device("c").come(world))
        await until(lambda: "c" in world.fleet._door._times, "it has its time")
        await world.operators.ban("c", "it was seen", "admin")
        with pytest.raises(Forbidden, match="it was seen"):
            await waiting


async def test_counters_are_the_ledgers(world):
    """Counted and refused updates are seen by operators, though the fleet itself never writes them."""
    devices = [await Device(name).come(world) for name in "ab"]
    await world.create(stop={"rounds": 1})
    await world.completed()
    await world.fleet.note("a", "a word")
    assert [record.updates_counted for record in await world.fleet.records()] == [1, 1]
    assert [len(device.receipts) for device in devices] == [1, 1]


async def test_a_session_that_nobody_attends_is_closed(tmp_path):
    """Its client died between two calls: behind the grace its place is free. Who came before it and attends stays."""
    async with World(tmp_path, reattach_grace_s=0.5, max_clients=2) as world:
        await Device("a").come(world)
        dead = await world.service.Register(Device("dead").registration(), None)
        await until(lambda: world.metric("fl_sessions") == 1, "its session is closed")
        with pytest.raises(UnknownSessionError):
            world.fleet.session(dead.session_id)
        assert world.fleet.attached("a")
