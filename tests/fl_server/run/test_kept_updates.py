"""Updates that a killed coordinator had received, admitted or refused, at the coordinator that starts next."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_server.errors import UploadBroken
from fl_server.rounds.events import DeadlinePassed
from fl_server.store.spool.spool import SpoolKey
from protos.codec import pack, unpack
from protos.fl.v1.training_pb2 import (
    REFUSAL_REASON_LEFT_OUT,
    REFUSAL_REASON_NOT_FINITE,
    Assignment,
    Receipt,
    UpdateHeader,
)
from tests.fl_server.devices import NO_CONTEXT, Device, stream, update_message, upload, work_of
from tests.fl_server.fleet_checks import Clock
from tests.fl_server.harness import Journal, World, until
from tests.fl_server.killed_runs import NAMES, Undisturbed, complete_run
from tests.marks import slow_except


async def refused(world: World, device: Device) -> tuple[UpdateHeader, bytes]:
    """The device sends a NaN, and its update is refused."""
    assignment = await device.assigned()
    _, data = await device.update(world, assignment)
    layout = world.coordinator.run("r").model.engine.layout
    header, data = update_message(assignment, layout, b"\xff" * 4 + data[4:])
    answer = await world.service.SubmitUpdate(stream(*upload(header, data, device.session)), NO_CONTEXT)
    assert answer.receipt.reason == REFUSAL_REASON_NOT_FINITE
    return header, data


async def test_a_client_refused_before_a_kill_delays_nothing(tmp_path: Path) -> None:
    """The quorum has delivered and the third update was refused: the round closes before its deadline."""
    devices = [Device(name, works=False) for name in NAMES]
    three = {"round": {"clients_per_round": 3, "quorum": 2}, "stop": {"rounds": 1}}
    async with World(tmp_path) as world:
        for device in devices:
            await device.connect(world)
        await world.create(**three)
        await refused(world, devices[0])
    for device in devices[1:]:
        device.works = True
    async with World(tmp_path) as world:
        assert len(await complete_run(world, devices)) == 1
        assert devices[0].outcomes["r", 0, 0].counted is False


@pytest.mark.parametrize("killed", [False, True])
async def test_bytes_are_those_of_the_undisturbed_round(tmp_path: Path, killed: bool) -> None:
    """One of three delivers before the kill, one has then fetched and sent a part, and one does all after it."""
    a, b, c = devices = [Device(name, works=False) for name in NAMES]
    world = await World(tmp_path).__aenter__()
    for device in devices:
        await device.connect(world)
    run = await world.create(round={"clients_per_round": 3}, stop={"rounds": 1})
    each = sum(sent.resource.size_bytes for sent in run.model.broadcasts)
    await a.contribute(world, await a.assigned())
    header, data = await b.update(world, await b.assigned())
    with pytest.raises(UploadBroken):
        await world.service.SubmitUpdate(stream(*list(upload(header, data, b.session))[:3]), NO_CONTEXT)
    if killed:
        world.journal.dead = True
        await world.__aexit__()
        world = await World(tmp_path).__aenter__()
        for device in devices:
            await device.connect(world)
    await b.contribute(world, await b.assigned())
    await c.contribute(world, await c.assigned())
    await world.completed()
    (commit,) = world.store.commits("r")
    await world.__aexit__()
    assert (commit.bytes_down, commit.bytes_up) == (3 * each, 3 * len(data))


async def test_a_repeated_upload_always_gets_the_first_receipt(tmp_path: Path) -> None:
    """Admitted or refused, before and after a kill, and after the commit: the receipts are equal."""
    devices = a, b, c = [Device(name, works=False) for name in NAMES]
    assignment = Assignment()

    async def send_again(world: World, device: Device) -> Receipt:
        header, data = await device.update(world, assignment)
        return (await world.service.SubmitUpdate(stream(*upload(header, data, device.session)), NO_CONTEXT)).receipt

    async with World(tmp_path) as world:
        for device in devices:
            await device.connect(world)
        await world.create(round={"clients_per_round": 3, "quorum": 2}, stop={"rounds": 1})
        assignment = await a.assigned()
        await refused(world, b)
        first = {"a": await send_again(world, a), "b": await send_again(world, b)}
        assert (first["a"].admitted, first["b"].admitted) == (True, False)
        world.journal.dead = True
    async with World(tmp_path) as world:
        for device in devices:
            await device.connect(world)
        assert {"a": await send_again(world, a), "b": await send_again(world, b)} == first
        await send_again(world, c)
        await world.completed()
        assert {"a": await send_again(world, a), "b": await send_again(world, b)} == first
        assert world.metric("fl_update_conflicts_total", run="r") == 2
        assert world.store.commits("r")[0].accepted == 2


async def test_a_refused_client_that_reattaches_delays_nothing(tmp_path: Path) -> None:
    """The refusal holds for the round, regardless of the connection."""
    a, b = Device("a", works=False), Device("b", works=False)
    async with World(tmp_path) as world:
        await a.connect(world)
        await b.connect(world)
        run = await world.create(round={"clients_per_round": 2, "quorum": 1}, stop={"rounds": 1})
        await refused(world, a)
        await a.leave()
        await a.connect(world)
        b.works = True
        await b.contribute(world, await b.assigned())
        assert len(await world.completed()) == 1
        assert run.rounds.recent[0].accepted == 1


@pytest.mark.parametrize("dies_at", slow_except([None, "save", "commit"], "commit"))
async def test_a_client_left_out_by_krum_gets_that_outcome(tmp_path: Path, dies_at: str | None) -> None:
    """Five deliver and two are kept: the poisoned client learns it, also after a kill between checkpoint and outcomes.

    The kill comes after the checkpoint or after the ledger's commit. Receipts do not change.
    """
    devices = [Device(name, works=name != "c") for name in "abcde"]
    krum = {"clients_per_round": 5, "quorum": 5, "reducer": "krum", "krum_keep": 2}
    sections = {"round": krum, "stop": {"rounds": 1}}
    async with World(tmp_path) as world:
        for device in devices:
            await device.connect(world)
        await world.create(**sections)
        if dies_at is not None:  # not the first model's checkpoint
            world.journal.dies_at = dies_at
        await send_poisoned(world, devices[2])
        await until(lambda: world.journal.dead or world.coordinator.run("r").ended, "killed or completed")
    async with World(tmp_path) as world:
        for device in devices:
            await device.connect(world)
        await world.completed()
        await until(lambda: len(devices[2].outcomes) == 1, "the poisoned client has its outcome")
        outcomes = [device.outcomes["r", 0, 0] for device in devices]
        assert [outcome.counted for outcome in outcomes].count(True) == 2
        outcome = outcomes[2]
        assert (outcome.counted, outcome.reason, outcome.digest) == (
            False,
            REFUSAL_REASON_LEFT_OUT,
            devices[2].kept["r", 0, 0][1].digest,
        )
        assert [record.updates_counted for record in world.store.clients()] == [int(each.counted) for each in outcomes]
        assert await devices[2].contribute(world, await devices[2].assigned()) == devices[2].receipts[0]


async def send_poisoned(world: World, device: Device) -> None:
    """The device sends the model times a hundred as its update."""
    assignment = await device.assigned()
    _, data = await device.update(world, assignment)
    layout = world.coordinator.run("r").model.engine.layout
    values = {name: 100 + value for name, value in unpack(data, layout).items()}
    device.kept["r", 0, 0] = (work_of(assignment), *update_message(assignment, layout, bytes(pack(values, layout))))
    await device.contribute(world, assignment)


@pytest.mark.parametrize("damage", slow_except(["torn", "short", "gone"], "torn"))
async def test_an_update_with_damaged_bytes_is_requested_again(
    tmp_path: Path, undisturbed: Undisturbed, damage: str
) -> None:
    """The ledger's row is dropped and the device sends the same bytes; the model equals the undisturbed one."""
    devices = [Device(name) for name in NAMES]
    async with World(tmp_path) as world:
        for device in devices:
            await device.connect(world)
            device.works = False
        run = await world.create()
        quick = devices[NAMES.index(await until(lambda: min(run.state.drawn, default=""), "a round is drawn"))]
        receipt = await quick.contribute(world, await quick.assigned())
        assert receipt is not None
        path = world.services.spool.path(SpoolKey("r", 0, 0, quick.name), receipt.digest.value)
        whole = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(whole[:100] if damage == "short" else b"\0" * 8 + whole[8:])
    for device in devices:
        device.works = True
    async with World(tmp_path) as world:
        assert await complete_run(world, devices) == undisturbed[0][0]
        assert [entry.event for entry in world.store.history("r")].count("update_dropped") == 1


async def a_fixed_list_with_a_torn_update(folder: Path, devices: list[Device]) -> Device:
    """Kill the coordinator after it fixed round 0's list, and damage one update. Returns the update's client."""
    async with World(folder, Journal("fix_accepted")) as world:
        world.spawn(complete_run(world, devices))
        await until(lambda: world.journal.dead, "the coordinator is killed")
        client, digest = world.store.accepted("r", 0, 0)[0]
    world.spool.path(SpoolKey("r", 0, 0, client), digest).write_bytes(b"torn")
    return devices[NAMES.index(client)]


async def test_a_client_completes_a_fixed_list(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """It sends the same bytes again, and the models equal the undisturbed ones."""
    devices = [Device(name) for name in NAMES]
    await a_fixed_list_with_a_torn_update(tmp_path, devices)
    async with World(tmp_path) as world:
        assert await complete_run(world, devices) == undisturbed[0][0]
        assert "round_restarted" not in [entry.event for entry in world.store.history("r")]


async def test_a_fixed_list_that_stays_torn_restarts_the_round(tmp_path: Path, clock: Clock) -> None:
    """The client does not return: the round is redrawn, with a row in the history, and the run completes."""
    devices = [Device(name) for name in NAMES]
    torn = await a_fixed_list_with_a_torn_update(tmp_path, devices)
    others = [device for device in devices if device is not torn]
    async with World(tmp_path) as world:
        completing = world.spawn(complete_run(world, others))
        await until(
            lambda: all(world.fleet.attendance.attached(device.name) for device in others), "the others are back"
        )
        clock.end_grace(world)
        assert len(await completing) == 2
        (restart,) = [entry for entry in world.store.history("r") if entry.event == "round_restarted"]
        assert restart.detail == "round 0: the bytes of accepted updates are lost, 1 of 2, and did not come again"
        assert {client for client, _ in world.store.accepted("r", 0, 0)} == {device.name for device in others}


async def test_a_fixed_list_that_is_torn_at_the_deadline_restarts_the_round(tmp_path: Path) -> None:
    """The client is present but does not deliver: the list is dropped, and the ledger keeps none of its updates."""
    devices = [Device(name) for name in NAMES]
    torn = await a_fixed_list_with_a_torn_update(tmp_path, devices)
    torn.works = False
    async with World(tmp_path) as world:
        await torn.connect(world)
        run = world.coordinator.run("r")
        run.post(DeadlinePassed())
        await until(lambda: run.state.attempt and world.store.accepted("r", 0, 0) is None, "the round is redrawn")
        assert world.store.updates("r", 0, 0) == []
