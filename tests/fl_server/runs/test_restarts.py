"""A coordinator that is killed after any of its writes, and the coordinator that starts next."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fl_server.errors import UploadBroken
from fl_server.rounds.events import DeadlinePassed
from fl_server.rounds.state import Phase
from fl_server.rpc.views import run_status
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

NAMES = ("a", "b", "c")
Outcome = tuple[list[str], list[Mapping[str, float]], list[list[tuple[str, bytes]] | None]]
"""Model digests, metrics and accepted lists of a run, by round."""
Undisturbed = tuple[Outcome, list[str]]
"""The outcome of a run without a kill, and its writes."""
REGISTERING = ["put_clients"] * 6
ROUND = ["open_attempt", "seal", "record_update", "seal", "record_update", "fix_accepted", "save", "commit"]
RUN = sorted([*REGISTERING, "save", "create_run", *2 * ROUND, *2 * ["set_metrics", "update_run"]])
"""All writes of two rounds; an evaluation is written during the next round."""


async def complete_run(world: World, devices: list[Device], **sections: Any) -> list[str]:
    """Connect the devices, create the run unless it exists, and wait for its end."""
    for device in devices:
        await device.connect(world)
    if not world.coordinator.runs():
        await world.create(**sections)
    return await world.completed()


async def run_with_kill(
    folder: Path, dies_at: int | str | None = None, **sections: Any
) -> tuple[Outcome, list[Device], list[str]]:
    """The outcome of a run whose coordinator was killed once, its devices, and the writes."""
    devices = [Device(name) for name in NAMES]
    if dies_at is not None:
        async with World(folder, Journal(dies_at)) as world:
            world.spawn(complete_run(world, devices, **sections))
            await until(lambda: world.journal.dead, "the coordinator is killed")
        devices[0].kept.clear()
    async with World(folder) as world:
        digests = await complete_run(world, devices, **sections)
        await until(lambda: all(commit.metrics for commit in world.store.commits("r")), "it is evaluated")
        metrics = [commit.metrics for commit in world.store.commits("r")]
        accepted = [world.store.accepted("r", round_, 0) for round_ in range(len(digests))]
        assert [commit.model_digest for commit in world.store.commits("r")] == digests
        return (digests, metrics, accepted), devices, world.journal.writes


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The outcome and the writes of a run without a kill."""
    outcome, _, writes = asyncio.run(run_with_kill(tmp_path_factory.mktemp("undisturbed")))
    return outcome, writes


def test_the_writes_of_a_run(undisturbed: Undisturbed) -> None:
    """Each round writes cohort, updates, list, checkpoint and commit, in that order, and nothing else.

    The updates of two devices may cross.
    """
    _, writes = undisturbed
    assert sorted(writes) == RUN
    rounds = [name for name in writes[len(REGISTERING) + 2 :] if name not in {"set_metrics", "update_run"}]
    for first in (0, len(ROUND)):
        assert [rounds[first], *sorted(rounds[first + 1 : first + 5]), *rounds[first + 5 : first + 8]] == [
            "open_attempt", "record_update", "record_update", "seal", "seal", "fix_accepted", "save", "commit",
        ]  # fmt: skip


@pytest.mark.parametrize("dies_at", range(len(REGISTERING) + 1, len(RUN) + 1))
async def test_a_kill_after_any_write_changes_no_bit(tmp_path: Path, undisturbed: Undisturbed, dies_at: int) -> None:
    """Models, metrics and accepted lists are equal, even if a device lost its computed updates.

    A counted device got its outcome with the digest of its update.
    """
    outcome, devices, _ = await run_with_kill(tmp_path, dies_at)
    assert outcome == undisturbed[0]
    for round_, accepted in enumerate(outcome[2]):
        assert accepted is not None
        for client, digest in accepted:
            received = devices[NAMES.index(client)].outcomes.get(("r", round_, 0))
            assert received is None or (received.counted and received.digest.value == digest)


async def test_the_history_records_a_restart(tmp_path: Path) -> None:
    """After the second of two updates: one row for each restart, with the point where the run continued."""
    devices = [Device(name) for name in NAMES]
    async with World(tmp_path, Journal("fix_accepted")) as world:
        world.spawn(complete_run(world, devices))
        await until(lambda: world.journal.dead, "the coordinator is killed")
    async with World(tmp_path) as world:
        await complete_run(world, devices)
        details = [entry.detail for entry in world.store.history("r") if entry.event == "run_recovered"]
        assert details == ["round 0: 2 updates of 2 clients are here"]


async def test_a_target_reached_before_a_kill_ends_the_run(tmp_path: Path) -> None:
    """The ledger has the evaluation but not the end: no further round follows."""
    sections: dict[str, Any] = {"stop": {"rounds": 5, "metric": "accuracy", "target": 0.01}}
    undisturbed, _, _ = await run_with_kill(tmp_path / "undisturbed", **sections)
    disturbed, _, _ = await run_with_kill(tmp_path / "disturbed", "set_metrics", **sections)
    assert disturbed == undisturbed
    assert len(disturbed[0]) == 1


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
        assert run.log.recent[0].accepted == 1


@pytest.mark.parametrize("dies_at", [None, "save", "commit"])
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


async def test_a_completed_run_can_be_extended_after_a_restart(tmp_path: Path) -> None:
    """It continues from its last round, and its next round accepts updates."""
    devices = [Device(name) for name in NAMES]
    async with World(tmp_path) as world:
        first = await complete_run(world, devices)
    async with World(tmp_path) as world:
        for device in devices:
            await device.connect(world)
        run = world.coordinator.run("r")
        await world.coordinator.actions.extend(run, 1, 0.0, "admin")
        await until(lambda: run.log.rounds == 3, "the added round is committed")
        digests = await world.completed()
        assert digests[:2] == first


@pytest.mark.parametrize("damage", ["torn", "short", "gone"])
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
        await until(lambda: all(world.fleet.attached(device.name) for device in others), "the others are back")
        clock.end_grace(world)
        assert len(await completing) == 2
        (restart,) = [entry for entry in world.store.history("r") if entry.event == "round_restarted"]
        assert restart.detail == "round 0: the bytes of 1 of its 2 accepted updates are lost, and did not come again"
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


async def test_a_restart_keeps_the_over_selection_factor(tmp_path: Path) -> None:
    """The ledger has the factor after a committed round: 1.5 + 0.2 * (1.1 - 1.5) = 1.42 without drop-outs."""
    devices = [Device(name) for name in NAMES]
    over = {"round": {"clients_per_round": 2, "close": "goal", "over_selection": 1.5, "min_clients": 3}}
    async with World(tmp_path) as world:
        await complete_run(world, devices, **over, stop={"rounds": 1})
        assert world.metric("fl_over_selection", run="r") == pytest.approx(1.42)
    async with World(tmp_path) as world:
        run = world.coordinator.run("r")
        assert run_status(run).over_selection == pytest.approx(1.42)
        assert run.state.over_selection == pytest.approx(1.42)
        assert run.state.over_selection == run.log.recent[0].over_selection


async def test_an_interrupted_end_is_finished_at_the_next_start(tmp_path: Path) -> None:
    """The ledger has the stop, but the open round was not yet abandoned: nothing of the round remains."""
    devices = [Device(name, works=False) for name in NAMES[:2]]
    async with World(tmp_path) as world:
        for device in devices:
            await device.connect(world)
        run = await world.create()
        await devices[0].contribute(world, await devices[0].assigned())
        world.journal.dies_at = "update_run"
        stopping = world.spawn(world.coordinator.actions.stop(run, "", "admin"))
        await until(lambda: world.journal.dead, "the coordinator is killed")
        await asyncio.gather(stopping, return_exceptions=True)
        assert len(world.store.updates("r", 0, 0)) == 1
    async with World(tmp_path) as world:
        assert world.coordinator.run("r").status == "stopped"
        assert (world.store.updates("r", 0, 0), world.services.spool.sweep()) == ([], [])


async def test_a_paused_run_is_paused_after_a_restart(tmp_path: Path) -> None:
    """Its open round continues, and no other round is drawn."""
    devices = [Device(name, works=False) for name in NAMES[:2]]
    async with World(tmp_path) as world:
        for device in devices:
            await device.connect(world)
        run = await world.create()
        await devices[0].assigned()
        await world.coordinator.actions.pause(run, "admin")
    async with World(tmp_path) as world:
        for device in devices:
            device.works = True
            await device.connect(world)
        run = world.coordinator.run("r")
        await until(lambda: run.log.rounds == 1, "the open round is committed")
        await until(lambda: run.state.phase is Phase.SELECTING, "it is between two rounds")
        assert (run.status, run.state.drawn) == ("paused", frozenset())
