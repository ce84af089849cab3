"""Registered and present clients over lost streams, restarts, and a ledger that is unavailable."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from structlog.testing import capture_logs

from fl_server.clients import registration
from fl_server.clients import registration as registration_module
from fl_server.clients.registration import common_protocol
from fl_server.errors import Fenced, Forbidden, InvalidInput, NoCommonProtocol, NoSuchRun, NotNow, UnknownSessionError
from fl_server.identity import Identity, caller
from fl_server.store.errors import StoreUnavailable
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import ExchangeKey
from protos.wire import PROTOCOL_MAX
from tests.fl_server.devices import NO_CONTEXT, Device
from tests.fl_server.fleet_checks import Clock, eligible, history, make_ledger_unavailable
from tests.fl_server.harness import World, until


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A coordinator without clients and with a reattach grace of 20 s."""
    async with World(tmp_path, reattach_grace_s=20.0, max_clients=3) as world:
        yield world


async def test_a_storm_of_changes_is_processed_once(world: World) -> None:
    """A hundred changes in one turn of the event loop cause one check of all clients, which sees the last of them."""
    await Device("a").connect(world)
    checks = []
    world.fleet.changes.listener = SimpleNamespace(  # type: ignore[assignment]  # a double
        fleet_changed=lambda: checks.append(world.fleet.eligibility.availability("a").detail),
        client_gone=lambda *_: None,
        client_attached=lambda _: None,
    )
    await until(lambda: world.fleet.changes.reported, "the change is reported")
    checks.clear()
    for index in range(100):
        world.fleet.eligibility.set_availability("a", pb.Availability(may_train=False, detail=str(index)))
    assert not checks
    await until(lambda: world.fleet.changes.reported, "the change is reported")
    assert checks == ["99"]


async def test_each_new_begin_of_a_privacy_account_is_in_the_history_once(world: World) -> None:
    """However often the device registers; also after a restart of the coordinator, which reads its history."""
    device = Device("a")
    for resets in (0, 1, 1, 2, 2):
        await world.service.Register(device.registration(privacy_resets=resets), NO_CONTEXT)
    await until(lambda: history(world).count("privacy_account_reset") == 2, "both are written")
    details = world.store.history_details("a", "privacy_account_reset")
    assert [detail.split(":")[0] for detail in details] == ["1 time so far", "2 times so far"]


async def test_an_attached_client_is_present(world: World) -> None:
    """A registration alone does not make a client present."""
    a = Device("a")
    answer = await world.service.Register(a.registration(), NO_CONTEXT)
    assert (answer.protocol, answer.coordinator_id) == (PROTOCOL_MAX, world.store.coordinator_id)
    assert (world.fleet.attendance.roster.present(), world.fleet.attendance.state("a")) == ((), "lost")
    await a.connect(world)
    assert (world.fleet.attendance.roster.present(), world.fleet.attendance.state("a"), eligible(world)) == (
        ("a",),
        "present",
        ("a",),
    )
    assert history(world) == ["client_registered", "client_back"]
    assert world.metric("fl_clients", state="present") == 1


@pytest.mark.parametrize(
    ("field", "value", "message"),
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
async def test_an_oversized_registration_is_refused(world: World, field: str, value: Any, message: str) -> None:
    """Nothing of it is stored."""
    with pytest.raises(InvalidInput, match=message):
        await world.service.Register(Device("a").registration(**{field: value}), NO_CONTEXT)
    assert world.store.clients() == []


async def test_an_overlong_name_gets_a_short_error(world: World) -> None:
    """The error shows as much of the name as fits into a status."""
    with pytest.raises(InvalidInput) as refused:
        await world.service.Register(Device("a").registration(client_id="x" * 1_000_000), NO_CONTEXT)
    with pytest.raises(NoSuchRun) as unknown:
        world.coordinator.run("x" * 1_000_000)
    assert len(str(refused.value)) + len(refused.value.detail.came) < 3000
    assert len(str(unknown.value)) + len(unknown.value.detail.run_id) < 3000


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"failures": [pb.WorkFailure()] * 65}, "failures: expected 64 at most, got 65"),
        ({"availability": pb.Availability(detail="x" * 257)}, "availability: expected 256 characters at most, got 257"),
        ({"availability": pb.Availability(until=Timestamp(seconds=-1))}, "availability.until: expected a time up to"),
    ],
)
async def test_an_oversized_report_is_refused(world: World, values: dict[str, Any], message: str) -> None:
    """Failures are processed one by one, and a note on availability is kept, logged and shown."""
    a = await Device("a").connect(world)
    with pytest.raises(InvalidInput, match=message):
        await world.service.ReportStatus(pb.ReportStatusRequest(session_id=a.session, **values), NO_CONTEXT)
    assert eligible(world) == ("a",)


async def test_a_client_with_a_lost_stream_has_a_grace(
    world: World, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During the grace the client is suspect and counts as present; after it the client is lost, also in the ledger."""
    a = await Device("a").connect(world)
    gone = []
    monkeypatch.setattr(world.fleet.changes.listener, "client_gone", lambda *args: gone.append(args))
    await a.leave()
    clock.now += 19.9
    world.fleet.attendance.tick()
    assert (world.fleet.attendance.state("a"), eligible(world), gone) == ("suspect", ("a",), [])
    await until(lambda: world.metric("fl_clients", state="suspect") == 1, "it is counted")
    clock.now += 0.1
    world.fleet.attendance.tick()
    assert (world.fleet.attendance.state("a"), eligible(world), gone) == ("lost", (), [("a", "lost")])
    await until(lambda: not world.store.clients()[0].present, "it is written down")
    await a.connect(world)
    assert history(world) == ["client_registered", "client_lost", "client_back"]


async def test_a_client_lost_during_a_ledger_outage_is_not_expected(
    world: World, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss is written as soon as possible, so that a restart does not wait for the client."""
    a = await Device("a").connect(world)
    await a.leave()
    with monkeypatch.context() as patch, capture_logs() as logs:
        make_ledger_unavailable(patch, world)
        clock.now += 20
        world.fleet.attendance.tick()
        await until(lambda: [log for log in logs if log["event"] == "presence_not_written"], "it is tried")
        assert world.store.clients()[0].present
    await until(lambda: not world.store.clients()[0].present, "it is written down")


async def test_a_client_that_returned_during_a_ledger_outage_is_present(
    world: World, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pending write of its loss is outdated."""
    a = await Device("a").connect(world)
    await a.leave()
    with monkeypatch.context() as patch:
        make_ledger_unavailable(patch, world)
        clock.now += 20
        world.fleet.attendance.tick()
        await asyncio.sleep(0)  # the first attempt
    await a.connect(world)
    await asyncio.gather(*world.fleet.records._background)
    assert world.store.clients()[0].present


async def test_presence_that_could_not_be_written_is_written_at_the_next_attempt(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that attaches during a ledger outage gets an error; after its next attempt a restart waits for it."""
    a = Device("a")
    a.session = (await world.service.Register(a.registration(), NO_CONTEXT)).session_id
    with monkeypatch.context() as patch:
        make_ledger_unavailable(patch, world)
        with pytest.raises(StoreUnavailable):
            await a._attend(world)
    a.stream = world.spawn(a._attend(world))
    await until(lambda: a.pushed("attached"), "it attends in the same session")
    assert world.store.clients()[0].present


async def test_a_client_that_returns_within_the_grace_was_never_lost(world: World, clock: Clock) -> None:
    """It keeps its session, and no loss is published."""
    a = await Device("a").connect(world)
    await a.leave()
    a.stream = world.spawn(a._attend(world))
    await until(lambda: world.fleet.attendance.attached("a"), "it is back")
    clock.now += 100
    world.fleet.attendance.tick()
    assert world.fleet.attendance.state("a") == "present"


async def test_a_restart_waits_for_the_clients_that_were_present(tmp_path: Path, clock: Clock) -> None:
    """The roster settles when the last of them is back or its grace is over; availability is reported again."""
    async with World(tmp_path) as world:
        for name in "abc":
            await Device(name).connect(world)
        await world.operators.ban("c", "smoke", "admin")
        await world.service.Register(Device("never-attended").registration(), NO_CONTEXT)
    async with World(tmp_path, reattach_grace_s=20.0) as world:
        assert (world.fleet.attendance.roster.settled, world.fleet.attendance.roster.present()) == (False, ("a", "b"))
        await Device("b").connect(world)
        assert not world.fleet.attendance.roster.settled
        clock.now += 20
        world.fleet.attendance.tick()
        assert (world.fleet.attendance.roster.settled, world.fleet.attendance.roster.present()) == (True, ("b",))


async def test_a_second_daemon_of_an_identity_fences_the_first(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one's stream ends with the reason, its session is invalid, and the history has a row."""
    first = await Device("a").connect(world)
    second = Device("a")
    registration = second.registration(instance_id="another")
    monkeypatch.setattr(second, "registration", lambda: registration)
    await second.connect(world)
    with pytest.raises(Fenced, match="another daemon uses the same identity: end one of the two"):
        await first.stream
    with pytest.raises(UnknownSessionError):
        world.fleet.sessions.of_call(first.session)
    assert (world.fleet.attendance.state("a"), world.fleet.attendance.attached("a")) == ("present", True)
    assert history(world) == ["client_registered", "client_fenced"]


async def test_attending_twice_in_a_session_ends_the_older_stream(world: World) -> None:
    """Without an error, and the client stays present."""
    a = await Device("a").connect(world)
    older = a.stream
    a.stream = world.spawn(a._attend(world))
    await older
    assert world.fleet.attendance.state("a") == "present"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"client_id": "a b"}, InvalidInput, "client_id: expected 1 to 64 of A-Z a-z 0-9 . _ -, got a b"),
        ({"client_id": "../x"}, InvalidInput, "client_id: expected 1 to 64"),
        ({"client_id": ""}, InvalidInput, "client_id: expected 1 to 64"),
        ({"tasks": []}, InvalidInput, "tasks: expected at least one task"),
        ({"protocol": {"min": PROTOCOL_MAX + 1, "max": PROTOCOL_MAX + 2}}, NoCommonProtocol, "upgrade the coordinator"),
        ({"protocol": {}}, NoCommonProtocol, "upgrade the client"),
    ],
)
async def test_an_invalid_registration_is_refused(
    world: World, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    """The error names the fault, and nothing is stored."""
    with pytest.raises(error, match=message):
        await world.service.Register(Device("a").registration(**changes), NO_CONTEXT)
    assert world.store.clients() == []


@pytest.mark.parametrize(("low", "high", "spoken"), [(1, 1, 1), (0, 9, PROTOCOL_MAX), (1, 7, PROTOCOL_MAX)])
def test_the_highest_common_protocol_is_chosen(low: int, high: int, spoken: int | None) -> None:
    """One common version is enough."""
    assert common_protocol(pb.ProtocolRange(min=low, max=high)) == spoken


@pytest.mark.parametrize(("low", "high", "spoken"), [(1, 1, 1), (1, 2, 2), (2, 3, 2)])
def test_a_next_protocol_version_is_spoken_with_those_who_know_it(
    low: int, high: int, spoken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator of a made-up next version speaks it, and the version before with older clients."""
    monkeypatch.setattr(registration, "PROTOCOL_MAX", 2)
    assert common_protocol(pb.ProtocolRange(min=low, max=high)) == spoken


def test_a_protocol_version_that_went_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that knows only the next version names both ranges and the side to upgrade."""
    monkeypatch.setattr(registration, "PROTOCOL_MIN", 2)
    monkeypatch.setattr(registration, "PROTOCOL_MAX", 2)
    with pytest.raises(NoCommonProtocol, match="supports 1 to 1, the coordinator 2 to 2; upgrade the client"):
        common_protocol(pb.ProtocolRange(min=1, max=1))


def test_an_inverted_protocol_range_is_refused() -> None:
    """Its minimum is above its maximum."""
    with pytest.raises(NoCommonProtocol):
        common_protocol(pb.ProtocolRange(min=2, max=1))


async def test_a_certificate_is_valid_for_its_own_name_only(world: World) -> None:
    """Another client's name and another client's session are refused."""
    a = await Device("a").connect(world)
    token = caller.set(Identity("client", "b"))
    with pytest.raises(Forbidden, match="client:b is not allowed"):
        world.fleet.sessions.of_call(a.session)
    with pytest.raises(Forbidden, match="client:b is not allowed"):
        await world.service.Register(Device("a").registration(), NO_CONTEXT)
    caller.reset(token)


async def test_a_full_coordinator_refuses_with_not_now(world: World) -> None:
    """One client over the limit is refused; a registered client may register again."""
    for name in "abc":
        await Device(name).connect(world)
    with pytest.raises(NotNow, match="3 connected clients, which is the limit here; try again in 60 s"):
        await Device("d").connect(world)
    await Device("a").connect(world)


async def test_registrations_over_the_rate_get_a_time_to_retry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one registration a second and a burst of two, the third must wait, and nothing of it is stored."""
    monkeypatch.setattr(registration_module, "LONGEST_WAIT_S", 0.0)
    async with World(tmp_path, registrations_per_s=1.0) as world:
        for name in "ab":
            await Device(name).connect(world)
        with pytest.raises(NotNow, match="many clients register at once") as refused:
            await Device("c").connect(world)
        assert 0 < refused.value.detail.wait.ToTimedelta().total_seconds() <= 1
        assert world.fleet.records.find("c") is None


async def test_a_registration_with_a_near_slot_waits_in_the_call(tmp_path: Path) -> None:
    """The fifth of a storm has a slot in half a second: it is admitted without a second call."""
    async with World(tmp_path, registrations_per_s=2.0) as world:
        for name in "abcde":
            await Device(name).connect(world)
        assert world.fleet.attendance.attached("e")


async def test_a_client_banned_while_it_waits_is_refused(tmp_path: Path) -> None:
    """The ban is checked after the wait."""
    async with World(tmp_path, registrations_per_s=1.0) as world:
        for name in "ab":
            await Device(name).connect(world)
        waiting = asyncio.ensure_future(Device("c").connect(world))
        await until(lambda: "c" in world.fleet.registration._limiter._slots, "it has its time")
        await world.operators.ban("c", "it was seen", "admin")
        with pytest.raises(Forbidden, match="it was seen"):
            await waiting


async def test_counters_come_from_the_ledger(world: World) -> None:
    """Operators see counted and refused updates, although the fleet itself never writes them."""
    devices = [await Device(name).connect(world) for name in "ab"]
    await world.create(stop={"rounds": 1})
    await world.completed()
    await world.fleet.records.write_note("a", "a text")
    assert [record.updates_counted for record in await world.fleet.records.all()] == [1, 1]
    assert [len(device.receipts) for device in devices] == [1, 1]


def shorten_grace(monkeypatch: pytest.MonkeyPatch, world: World) -> float:
    """The grace of the clients that register from now on, in seconds."""
    limits = world.config.limits.model_copy(update={"reattach_grace_s": 0.01})
    monkeypatch.setattr(world.fleet.registration, "_limits", limits)
    return limits.reattach_grace_s


async def test_a_session_without_a_stream_is_closed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client stopped between two calls: after the grace its slot is free. An attached client stays."""
    await Device("a").connect(world)
    shorten_grace(monkeypatch, world)
    dead = await world.service.Register(Device("dead").registration(), NO_CONTEXT)
    await until(lambda: world.metric("fl_sessions") == 1, "its session is closed")
    with pytest.raises(UnknownSessionError):
        world.fleet.sessions.of_call(dead.session_id)
    assert world.fleet.attendance.attached("a")


async def test_the_grace_to_attend_begins_with_the_answer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger that is slower than the grace closes no session of a client that has not got its answer yet."""
    grace_s, writes, written = shorten_grace(monkeypatch, world), asyncio.Event(), asyncio.Event()
    write = world.fleet.records.write

    async def slow(*args: Any) -> None:
        await write(*args)
        writes.set()
        await written.wait()

    monkeypatch.setattr(world.fleet.records, "write", slow)
    answering = asyncio.create_task(world.service.Register(Device("a").registration(), NO_CONTEXT))
    await writes.wait()
    # Timers of one loop fire in their order: a grace that began before the write is over when this one fires.
    asyncio.get_running_loop().call_later(2 * grace_s, written.set)
    answer = await answering
    assert world.fleet.sessions.of_call(answer.session_id).client_id == "a"
