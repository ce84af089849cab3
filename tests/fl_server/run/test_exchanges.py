"""Rounds with several exchanges, with several payloads, and with client states."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import (
    PAYLOAD_KIND_DELTA,
    PAYLOAD_KIND_FULL_GRADIENT,
    PAYLOAD_KIND_VARIATE_CHANGE,
    REFUSAL_REASON_LATE,
)
from tests.fl_server.devices import NO_CONTEXT, Device, stream, upload
from tests.fl_server.harness import Journal, World, until
from tests.marks import slow_except

D = TypeVar("D", bound=Device)
NAMES = ("a", "b", "c")
TWO = {"clients_per_round": 2, "quorum": 2}
MIME = {"algorithm": {"name": "mime"}, "round": TWO}
SCAFFOLD = {"algorithm": {"name": "scaffold"}, "population": 3, "round": TWO, "stop": {"rounds": 3}}
FIRST_OPTION = {**SCAFFOLD, "algorithm": {"name": "scaffold", "parameters": {"option": "I"}}}
TWO_ROUNDS = {"stop": {"rounds": 2}}
METHODS = {"mime": MIME, "scaffold": {**SCAFFOLD, **TWO_ROUNDS}, "scaffold-I": {**FIRST_OPTION, **TWO_ROUNDS}}
"""Two rounds are enough: the second one depends on the states and on the momentum of the first."""


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A coordinator without clients."""
    async with World(tmp_path) as world:
        yield world


async def connect_all(world: World, devices: Collection[D]) -> list[D]:
    """Connect all devices, in order."""
    for device in devices:
        await device.connect(world)
    return list(devices)


async def run_with_kill(
    folder: Path, sections: dict[str, Any], dies_at: int | None = None
) -> tuple[tuple[list[str], list[Any], int], list[Device], list[str]]:
    """Digests and accepted lists of a run whose coordinator was killed once, its devices, and the writes."""
    devices = [Device(name) for name in NAMES]

    async def complete_run(world: World) -> list[str]:
        await connect_all(world, devices)
        if not world.coordinator.runs():
            await world.create(**sections)
        return await world.completed()

    if dies_at is not None:
        async with World(folder, Journal(dies_at)) as world:
            world.spawn(complete_run(world))
            await until(lambda: world.journal.dead, "the coordinator is killed")
    async with World(folder) as world:
        digests = await complete_run(world)
        exchanges = world.coordinator.run("r").state.policy.exchanges
        lists = [world.store.accepted("r", round_, each) for round_ in range(len(digests)) for each in range(exchanges)]
        epoch = world.coordinator.run("r").record.state_epoch
        return (digests, lists, epoch), devices, world.journal.writes


@pytest.mark.slow
@pytest.mark.parametrize("method", slow_except(METHODS, "scaffold"))
def test_a_kill_after_any_write_changes_no_bit(tmp_path: Path, method: str) -> None:
    """Models and lists equal those of the undisturbed run, no state restarts, and counted clients learn it."""

    async def all_kills() -> None:
        undisturbed, _, writes = await run_with_kill(tmp_path / "undisturbed", METHODS[method])
        assert undisturbed[2] == 0
        for dies_at in range(writes.index("create_run") + 1, len(writes), 2):
            outcome, devices, _ = await run_with_kill(tmp_path / str(dies_at), METHODS[method], dies_at)
            assert outcome == undisturbed, f"it was killed after write {dies_at}, {writes[dies_at - 1]}"
            for device in devices:
                assert all(not received.counted or received.digest for received in device.outcomes.values())

    asyncio.run(all_kills())


async def test_the_second_exchange_goes_to_the_accepted_of_the_first(world: World) -> None:
    """With a direction made from the first exchange's payloads, and the same model."""
    devices = await connect_all(world, [Device(name) for name in NAMES])
    await world.create(**MIME, stop={"rounds": 1})
    await world.completed()
    asked = [device for device in devices if device.pushed("assignment")]
    assert len(asked) == 2
    for device in asked:
        first, second = await device.assigned(0, 0), await device.assigned(0, 1)
        assert (list(first.payloads), list(second.payloads)) == ([PAYLOAD_KIND_FULL_GRADIENT], [PAYLOAD_KIND_DELTA])
        assert len(first.resources) == 1
        assert second.resources[0] == first.resources[0]
        assert len(second.resources) == 2
        assert [device.outcomes["r", 0, exchange].counted for exchange in (0, 1)] == [True, True]


async def test_a_draining_coordinator_sends_no_second_exchange(tmp_path: Path) -> None:
    """The cohort is in the ledger, and the next coordinator sends the assignments."""
    devices = [Device(name, works=False) for name in NAMES[:2]]
    async with World(tmp_path) as world:
        await connect_all(world, devices)
        run = await world.create(**MIME, stop={"rounds": 1})
        assigned = [await device.assigned() for device in devices]
        run.drain()
        for device, work in zip(devices, assigned, strict=True):
            await device.contribute(world, work)
        await until(lambda: run.state.exchange == 1 and run.deadline.started, "the second exchange is opened")
        for device in devices:
            world.fleet.streams.push(device.name, pb.AttendResponse(notice=pb.Notice(text="the last message")))
            await until(partial(device.pushed, "notice"), "it has received all messages")
        assert [len(device.pushed("assignment")) for device in devices] == [1, 1]
    async with World(tmp_path) as world:
        await connect_all(world, devices)
        for device in devices:
            assert (await device.assigned(0, 1)).key.exchange == 1


def events(world: World) -> list[str]:
    """The events in the run's history."""
    return [entry.event for entry in world.store.history("r")]


async def test_a_second_exchange_that_loses_a_client_redraws_the_round(world: World) -> None:
    """An accepted client cannot be replaced; the updates of the first draw are dropped."""
    devices = await connect_all(world, [Device(name, works=False) for name in NAMES])
    run = await world.create(**MIME, stop={"rounds": 1})
    await until(lambda: run.state.drawn, "two are drawn")
    quick, slow = (device for device in devices if device.name in run.state.drawn)
    for device in (quick, slow):
        await device.contribute(world, await device.assigned())
    stale = await slow.assigned(0, 1)
    header, data = await slow.update(world, stale)
    await quick.contribute(world, await quick.assigned(0, 1))
    await slow.report_failure(world, stale, pb.FAILURE_REASON_RESOURCES)
    await until(lambda: "round_restarted" in events(world), "the round is redrawn")
    assert quick.pushed("cancel") == []
    assert events(world).count("round_restarted") == 1
    assert run.state.first_attempt == 1
    for device in devices:
        device.works = True
        if device.name in run.state.outstanding:
            world.spawn(device.contribute(world, await device.assigned()))
    await until(lambda: run.state.exchange == 1 or run.ended, "the second exchange is open again")
    late = await world.service.SubmitUpdate(stream(*upload(header, data, slow.session)), NO_CONTEXT)
    assert late.receipt.reason == REFUSAL_REASON_LATE
    assert len(await world.completed()) == 1


async def test_a_method_can_require_a_second_payload(world: World) -> None:
    """SCAFFOLD's first option: the delta, followed by the change of the variate."""
    (device,) = await connect_all(world, [Device("a")])
    await world.create(**{**FIRST_OPTION, "round": {"clients_per_round": 1}, "stop": {"rounds": 1}})
    await world.completed()
    assert list((await device.assigned()).payloads) == [PAYLOAD_KIND_DELTA, PAYLOAD_KIND_VARIATE_CHANGE]
    _, header, data = device.kept["r", 0, 0]
    assert len(data) == header.size_bytes == world.store.updates("r", 0, 0)[0].size_bytes
    assert len(header.payloads) == 2


async def test_an_assignment_names_the_update_of_the_clients_state(world: World) -> None:
    """None before the client's first counted update; then the latest, with its clip factor."""
    (device,) = await connect_all(world, [Device("a")])
    norms = {"clients_per_round": 1, "clip_update_norm": 1e-3}
    await world.create(**{**SCAFFOLD, "round": norms})
    await world.completed()
    assigned = {each.key.round: each for each in device.pushed("assignment")}
    assert not assigned[0].HasField("counted")
    assert assigned[2].counted == device.outcomes["r", 1, 0]
    update = world.store.updates("r", 1, 0)[0]
    assert assigned[2].counted.clip_factor == update.clip_factor == pytest.approx(1e-3 / update.norm)


async def test_a_lost_state_restarts_all_states(world: World) -> None:
    """In a new epoch. Each client's first assignment of it names no earlier update; c is zero again."""
    devices = await connect_all(world, [Device(name) for name in NAMES])
    devices[1].loses_state_in = 2
    run = await world.create(**{**SCAFFOLD, "round": {"clients_per_round": 3}, "stop": {"rounds": 4}})
    await world.completed()
    assert run.record.state_epoch == 1
    assert [commit.state_epoch for commit in world.store.commits("r")] == [0, 0, 1, 1]
    for device in devices:
        in_new_epoch = [each for each in device.pushed("assignment") if each.state_epoch == 1]
        assert (in_new_epoch[0].key.round, in_new_epoch[0].HasField("counted")) == (2, False)
    lines = [entry.detail for entry in world.store.history("r") if entry.event == "states_restarted"]
    assert lines == ["round 2: b: the test asked for it"]


async def test_forgetting_a_member_restarts_the_states(world: World) -> None:
    """The member's part of the sum could never change again."""
    devices = await connect_all(world, [Device(name) for name in NAMES])
    run = await world.create(**{**SCAFFOLD, "stop": {"rounds": 2000}})
    await until(lambda: "a" in run.state.members, "a has counted")
    await world.operators.forget("a", "admin")
    await until(lambda: run.record.state_epoch == 1, "the states are restarted")
    assert "a" not in run.client_states.members
    await world.coordinator.actions.stop(run, "", "admin")
    assert devices[1].pushed("run_ended")[0].run_id == "r"


async def test_a_full_population_draws_no_other_client(world: World) -> None:
    """The first N clients with counted updates are the population; others are drawn only after a restart of states."""
    devices = await connect_all(world, [Device(name) for name in (*NAMES, "d")])
    await world.create(**{**SCAFFOLD, "stop": {"rounds": 8}})
    await world.completed()
    assert [bool(device.pushed("assignment")) for device in devices] == [True, True, True, False]


async def test_without_a_sum_a_lost_state_restarts_one_client(world: World) -> None:
    """FedRobust: a client that lost its state starts again from zero; the others keep theirs."""
    devices = await connect_all(world, [Device(name) for name in NAMES[:2]])
    sections = {"algorithm": {"name": "fedrobust"}, "stop": {"rounds": 3}}
    devices[0].loses_state_in = 1
    run = await world.create(**sections)
    await world.completed()
    assert run.record.state_epoch == 0
    assert [entry.event for entry in world.store.history("r")].count("state_lost") == 1


async def test_an_extended_run_restarts_the_states(world: World) -> None:
    """Clients deleted them when the run ended."""
    devices = await connect_all(world, [Device(name) for name in NAMES])
    run = await world.create(**SCAFFOLD)
    await world.completed()
    await world.coordinator.actions.extend(run, 1, 0.0, "admin")
    await world.completed()
    assert [commit.state_epoch for commit in world.store.commits("r")] == [0, 0, 0, 1]
    assert not any(each.HasField("counted") for device in devices for each in device.pushed("assignment")
                   if each.key.round == 3)  # fmt: skip


async def test_a_registration_returns_the_ended_runs(world: World) -> None:
    """Runs that ended, and runs that this coordinator does not know."""
    (device,) = await connect_all(world, [Device("a")])
    await world.create(**{**SCAFFOLD, "round": {"clients_per_round": 1}})
    await world.completed()
    states = [pb.HeldState(run_id=run, state_epoch=0) for run in ("r", "another")]
    answer = await world.service.Register(device.registration(states=states), NO_CONTEXT)
    assert list(answer.ended_runs) == ["r", "another"]


async def test_a_client_that_attends_is_told_which_runs_have_ended(world: World) -> None:
    """Runs that ended, and runs that this coordinator does not know; also in its session, where a message was lost."""
    (device,) = await connect_all(world, [Device("a")])
    await world.create(**{**SCAFFOLD, "round": {"clients_per_round": 1}})
    await world.completed()
    await until(lambda: device.pushed("run_ended"), "it was told once")
    states = [pb.HeldState(run_id=run, state_epoch=0) for run in ("r", "another")]
    stream = aiter(world.service.Attend(pb.AttendRequest(session_id=device.session, states=states), NO_CONTEXT))
    events = [await anext(stream) for _ in range(3)]
    assert events[0].HasField("attached")
    assert [event.run_ended.run_id for event in events[1:]] == ["r", "another"]


async def test_a_delta_over_the_limit_is_scaled_down(world: World) -> None:
    """To the limit, also in the sums: x moves by the clipped delta."""
    (device,) = await connect_all(world, [Device("a")])
    rounds = {"clients_per_round": 1, "clip_update_norm": 1e-3}
    run = await world.create(algorithm={"name": "fedavg"}, round=rounds, stop={"rounds": 1})
    await world.completed()
    assert run.rounds.recent[0].accepted == 1
    assert world.metric("fl_norm", run="r", of="aggregate") == pytest.approx(1e-3, rel=1e-4)
    assert device.outcomes["r", 0, 0].clip_factor < 0.1
