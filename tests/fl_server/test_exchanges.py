"""Rounds of several exchanges, of several payloads, and of clients that keep a state."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import (
    PAYLOAD_KIND_DELTA,
    PAYLOAD_KIND_FULL_GRADIENT,
    PAYLOAD_KIND_VARIATE_CHANGE,
    REFUSAL_REASON_LATE,
)
from tests.fl_server.devices import Device, stream, upload
from tests.fl_server.harness import Journal, World, until

NAMES = ("a", "b", "c")
TWO = {"clients_per_round": 2, "quorum": 2}
MIME = {"algorithm": {"name": "mime"}, "round": TWO}
SCAFFOLD = {"algorithm": {"name": "scaffold"}, "population": 3, "round": TWO, "stop": {"rounds": 3}}
FIRST_OPTION = {**SCAFFOLD, "algorithm": {"name": "scaffold", "parameters": {"option": "I"}}}
METHODS = {"mime": MIME, "scaffold": SCAFFOLD, "scaffold-I": FIRST_OPTION}


@pytest.fixture
async def world(tmp_path):
    """A coordinator without clients."""
    async with World(tmp_path) as world:
        yield world


async def arrive(world, devices):
    """All of them, in order."""
    for device in devices:
        await device.come(world)
    return devices


async def lived(folder, sections, dies_at=None):
    """Digests and accepted lists of a run whose coordinator died once, its devices, and what was written."""
    devices = [Device(name) for name in NAMES]

    async def a_run(world):
        await arrive(world, devices)
        if not world.coordinator.runs():
            await world.create(**sections)
        return await world.completed()

    if dies_at is not None:
        async with World(folder, Journal(dies_at)) as world:
            world.spawn(a_run(world))
            await until(lambda: world.journal.dead, "it dies, and has not written all before")
    async with World(folder) as world:
        digests = await a_run(world)
        exchanges = world.coordinator.run("r").state.policy.exchanges
        lists = [world.store.accepted("r", round_, each) for round_ in range(len(digests)) for each in range(exchanges)]
        epoch = world.coordinator.run("r").record.state_epoch
        return (digests, lists, epoch), devices, world.journal.writes


@pytest.mark.parametrize("method", METHODS)
def test_death_behind_any_write_changes_no_bit(tmp_path, method):
    """The same models and lists as undisturbed, no state is restarted, and each that counted is told so."""

    async def all_deaths():
        undisturbed, _, writes = await lived(tmp_path / "undisturbed", METHODS[method])
        assert undisturbed[2] == 0
        for dies_at in range(writes.index("create_run") + 1, len(writes), 2):
            outcome, devices, _ = await lived(tmp_path / str(dies_at), METHODS[method], dies_at)
            assert outcome == undisturbed, f"it died behind write {dies_at}, {writes[dies_at - 1]}"
            for device in devices:
                assert all(not heard.counted or heard.digest for heard in device.outcomes.values())

    asyncio.run(all_deaths())


async def test_the_second_exchange_goes_to_the_accepted_of_the_first(world):
    """With a direction that the first one's payloads make, and the same model."""
    devices = await arrive(world, [Device(name) for name in NAMES])
    await world.create(**MIME, stop={"rounds": 1})
    await world.completed()
    asked = [device for device in devices if device.told("assignment")]
    assert len(asked) == 2
    for device in asked:
        first, second = await device.assigned(0, 0), await device.assigned(0, 1)
        assert (list(first.payloads), list(second.payloads)) == ([PAYLOAD_KIND_FULL_GRADIENT], [PAYLOAD_KIND_DELTA])
        assert len(first.resources) == 1
        assert second.resources[0] == first.resources[0]
        assert len(second.resources) == 2
        assert [device.outcomes["r", 0, exchange].counted for exchange in (0, 1)] == [True, True]


async def test_a_coordinator_that_leaves_gives_no_second_exchange_out(tmp_path):
    """The cohort stands in the ledger, and the next coordinator tells it."""
    devices = [Device(name, works=False) for name in NAMES[:2]]
    async with World(tmp_path) as world:
        await arrive(world, devices)
        run = await world.create(**MIME, stop={"rounds": 1})
        assigned = [await device.assigned() for device in devices]
        run.hold()
        for device, work in zip(devices, assigned, strict=True):
            await device.contribute(world, work)
        await until(lambda: run.deadline._attempt == (0, 1, 0), "the second exchange is opened")
        for device in devices:
            world.fleet.push(device.name, pb.AttendResponse(notice=pb.Notice(text="behind what was pushed")))
            await until(partial(device.told, "notice"), "it has heard all")
        assert [len(device.told("assignment")) for device in devices] == [1, 1]
    async with World(tmp_path) as world:
        await arrive(world, devices)
        for device in devices:
            assert (await device.assigned(0, 1)).key.exchange == 1


def told_of(world):
    """The events in the run's history."""
    return [entry.event for entry in world.store.history("r")]


async def test_a_second_exchange_that_loses_a_client_begins_the_round_anew(world):
    """Nobody can stand in for an accepted client; what the first drawing collected is forgotten."""
    devices = await arrive(world, [Device(name, works=False) for name in NAMES])
    run = await world.create(**MIME, stop={"rounds": 1})
    await until(lambda: run.state.drawn, "two are drawn")
    quick, slow = (device for device in devices if device.name in run.state.drawn)
    for device in (quick, slow):
        await device.contribute(world, await device.assigned())
    stale = await slow.assigned(0, 1)
    header, data = await slow.update(world, stale)
    await quick.contribute(world, await quick.assigned(0, 1))
    await slow.fails(world, stale, pb.FAILURE_REASON_RESOURCES)
    await until(lambda: "round_restarted" in told_of(world), "the round is drawn anew")
    assert quick.told("cancel") == []
    assert told_of(world).count("round_restarted") == 1
    assert run.state.first_attempt == 1
    for device in devices:
        device.works = True
        if device.name in run.state.outstanding:
            world.spawn(device.contribute(world, await device.assigned()))
    await until(lambda: run.state.exchange == 1 or run.ended, "the second exchange is open again")
    late = await world.service.SubmitUpdate(stream(*upload(header, data, slow.session)), None)
    assert late.receipt.reason == REFUSAL_REASON_LATE
    assert len(await world.completed()) == 1


async def test_a_payload_more_comes_up_where_the_method_wants_it(world):
    """SCAFFOLD's first option: the delta, and behind it the change of the variate."""
    (device,) = await arrive(world, [Device("a")])
    await world.create(**{**FIRST_OPTION, "round": {"clients_per_round": 1}, "stop": {"rounds": 1}})
    await world.completed()
    assert list((await device.assigned()).payloads) == [PAYLOAD_KIND_DELTA, PAYLOAD_KIND_VARIATE_CHANGE]
    _, header, data = device.kept["r", 0, 0]
    assert len(data) == header.size_bytes == world.store.updates("r", 0, 0)[0].size_bytes
    assert len(header.payloads) == 2


async def test_a_client_is_told_which_update_its_state_is_of(world):
    """Nothing before its first that counted; then the latest, with what it was clipped by."""
    (device,) = await arrive(world, [Device("a")])
    norms = {"clients_per_round": 1, "clip_update_norm": 1e-3}
    await world.create(**{**SCAFFOLD, "round": norms})
    await world.completed()
    told = {each.key.round: each for each in device.told("assignment")}
    assert not told[0].HasField("counted")
    assert told[2].counted == device.outcomes["r", 1, 0]
    update = world.store.updates("r", 1, 0)[0]
    assert told[2].counted.clip_factor == update.clip_factor == pytest.approx(1e-3 / update.norm)


async def test_a_lost_state_restarts_all_of_them(world):
    """In a new epoch, of which everybody's first assignment names no earlier update; c is zero again."""
    devices = await arrive(world, [Device(name) for name in NAMES])
    devices[1].loses_state_in = 2
    run = await world.create(**{**SCAFFOLD, "round": {"clients_per_round": 3}, "stop": {"rounds": 4}})
    await world.completed()
    assert run.record.state_epoch == 1
    assert [commit.state_epoch for commit in run.log.commits.values()] == [0, 0, 1, 1]
    for device in devices:
        anew = [each for each in device.told("assignment") if each.state_epoch == 1]
        assert (anew[0].key.round, anew[0].HasField("counted")) == (2, False)
    lines = [entry.detail for entry in world.store.history("r") if entry.event == "states_restarted"]
    assert lines == ["round 2: b: as the test wants it"]


async def test_a_forgotten_member_takes_its_state_with_it(world):
    """Its part of the sum could never change again."""
    devices = await arrive(world, [Device(name) for name in NAMES])
    run = await world.create(**{**SCAFFOLD, "stop": {"rounds": 2000}})
    await until(lambda: "a" in run.state.members, "a has counted")
    await world.operators.forget("a", "admin")
    await until(lambda: run.record.state_epoch == 1, "the states are restarted")
    assert "a" not in run.client_states.members
    await world.coordinator.stop(run, "", "admin")
    assert devices[1].told("run_ended")[0].run_id == "r"


async def test_a_population_has_no_place_for_more(world):
    """The first N by id whose updates count are the population; another one is drawn only once states restart."""
    devices = await arrive(world, [Device(name) for name in (*NAMES, "d")])
    await world.create(**{**SCAFFOLD, "stop": {"rounds": 8}})
    await world.completed()
    assert [bool(device.told("assignment")) for device in devices] == [True, True, True, False]


async def test_a_client_alone_starts_anew_where_no_sum_is_kept(world):
    """FedRobust: one that lost its state is asked again from the start; the others go on."""
    devices = await arrive(world, [Device(name) for name in NAMES[:2]])
    sections = {"algorithm": {"name": "fedrobust"}, "stop": {"rounds": 3}}
    devices[0].loses_state_in = 1
    run = await world.create(**sections)
    await world.completed()
    assert run.record.state_epoch == 0
    assert [entry.event for entry in world.store.history("r")].count("state_lost") == 1


async def test_states_of_an_extended_run_begin_anew(world):
    """Clients forgot them when the run ended."""
    devices = await arrive(world, [Device(name) for name in NAMES])
    run = await world.create(**SCAFFOLD)
    await world.completed()
    await world.coordinator.extend(run, 1, 0.0, "admin")
    await world.completed()
    assert [commit.state_epoch for commit in run.log.commits.values()] == [0, 0, 0, 1]
    assert not any(each.HasField("counted") for device in devices for each in device.told("assignment")
                   if each.key.round == 3)  # fmt: skip


async def test_a_daemon_hears_on_registration_which_runs_are_over(world):
    """Those that ended, and those that this coordinator never had."""
    (device,) = await arrive(world, [Device("a")])
    await world.create(**{**SCAFFOLD, "round": {"clients_per_round": 1}})
    await world.completed()
    states = [pb.HeldState(run_id=run, state_epoch=0) for run in ("r", "another")]
    answer = await world.service.Register(device.registration(states=states), None)
    assert list(answer.ended_runs) == ["r", "another"]


async def test_a_longer_delta_is_scaled_down(world):
    """To the limit, in the sums too: x moves by the clipped delta."""
    (device,) = await arrive(world, [Device("a")])
    rounds = {"clients_per_round": 1, "clip_update_norm": 1e-3}
    run = await world.create(algorithm={"name": "fedavg"}, round=rounds, stop={"rounds": 1})
    await world.completed()
    assert run.log.commits[0].accepted == 1
    assert world.metric("fl_norm", run="r", of="aggregate") == pytest.approx(1e-3, rel=1e-4)
    assert device.outcomes["r", 0, 0].clip_factor < 0.1
