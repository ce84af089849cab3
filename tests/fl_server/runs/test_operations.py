"""What operators do with a run: pause, resume, stop, extend."""

from __future__ import annotations

import asyncio

import pytest

from fl_server.errors import InvalidInput, WrongState
from fl_server.rounds import events as ev
from fl_server.rounds.state import Phase
from fl_server.store.errors import StoreFull
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import REFUSAL_REASON_ABANDONED, ExchangeKey
from tests.fl_server.devices import connect, deliver
from tests.fl_server.harness import World, until

ONE_ROUND = {"stop": {"rounds": 1}}


async def test_a_pause_finishes_the_round_and_draws_no_next_one(world: World) -> None:
    """The open round is committed; the next one is drawn after a resume."""
    devices = await connect(world, "a", "b")
    run = await world.create()
    await world.coordinator.actions.pause(run, "admin:eve")
    for device in devices:
        await deliver(world, device)
    await until(lambda: run.rounds.committed == 1, "the open round is committed")
    await until(lambda: run.state.phase is Phase.SELECTING, "it is between two rounds")
    assert (run.status, run.record.state, run.state.drawn) == ("paused", "paused", frozenset())
    await world.coordinator.actions.resume(run, "admin:eve")
    assert run.status == "running"
    assert [entry.actor for entry in world.store.history("r")].count("admin:eve") == 2


async def test_a_stop_abandons_the_open_round(world: World) -> None:
    """Clients are informed, no file of the round remains, and a pending update gets the reason ABANDONED."""
    devices = await connect(world, "a", "b")
    run = await world.create()
    await deliver(world, devices[0])
    await devices[1].assigned()
    await world.coordinator.actions.stop(run, "", "admin")
    await world.ended()
    await until(lambda: devices[1].pushed("cancel"), "the other is cancelled")
    assert devices[1].pushed("cancel")[0].reason == REFUSAL_REASON_ABANDONED
    assert run.state.ending == ("stopped", "an operator stopped it")
    await until(lambda: not world.services.spool.sweep(), "the spool is empty")
    assert world.store.updates("r", 0, 0) == []
    (outcome,) = await world.coordinator.outcomes.decided([ExchangeKey(run_id="r", round=0)], "a")
    assert (outcome.counted, outcome.reason) == (False, REFUSAL_REASON_ABANDONED)
    assert [[end.run_id for end in device.pushed("run_ended")] for device in devices] == [["r"], ["r"]]


async def test_a_client_that_was_away_is_told_of_the_end_when_it_comes_back(world: World) -> None:
    """In its session, in which it asks about its state as often as it attends."""
    (device,) = await connect(world, "a")
    run = await world.create(round={"clients_per_round": 1})
    await device.assigned()
    await device.leave()
    await world.coordinator.actions.stop(run, "", "admin")
    for _ in range(2):
        device.messages.clear()
        device.stream = world.spawn(device._attend(world, states=[pb.HeldState(run_id="r")]))
        await until(lambda: device.pushed("run_ended"), "it is told")
        await device.leave()


async def test_an_operation_from_the_wrong_state_is_refused(world: World) -> None:
    """The error names the state and the allowed states."""
    run = await world.create()
    await until(lambda: run.status == "waiting", "it waits")
    with pytest.raises(WrongState, match="run 'r' is waiting; resuming needs it to be paused"):
        await world.coordinator.actions.resume(run, "admin")
    await world.coordinator.actions.stop(run, "enough", "admin")
    with pytest.raises(WrongState, match="run 'r' is stopped; stopping needs"):
        await world.coordinator.actions.stop(run, "", "admin")
    with pytest.raises(WrongState, match="extending needs"):
        await world.coordinator.actions.extend(run, 1, 0.0, "admin")


async def test_an_extension_adds_rounds(world: World) -> None:
    """To an open run and to an ended one; both keep their models."""
    devices = await connect(world, "a", "b", works=True)
    run = await world.create(stop={"rounds": 1, "wall_time_s": 1000.0})
    first = await world.completed()
    assert run.spec.stop.rounds == 1
    await world.coordinator.actions.extend(run, 2, 0.0, "admin")
    assert run.spec.stop.rounds == 3
    assert not run.ended
    await until(lambda: run.ended, "it ends again")
    digests = await world.completed()
    assert (len(digests), digests[:1], run.record.reason) == (3, first, "3 rounds are done")
    assert (run.config.stop.wall_time_s, run.config.horizon) == (1000.0, 1)
    assert all(device.outcomes["r", 2, 0].counted for device in devices)


@pytest.mark.parametrize("over", [False, True], ids=["running", "completed"])
async def test_concurrent_extensions_add_up(world: World, over: bool) -> None:
    """Each of them counts, and each has its row in the history."""
    run = await world.create(stop={"rounds": 5, "wall_time_s": 1000.0})
    if over:
        run.post(ev.EndRequested("completed", "the test ended it"))
        await until(lambda: run.ended and run.record.ended_at, "it is completed")
    await asyncio.gather(*(world.coordinator.actions.extend(run, rounds, 10.0, "admin") for rounds in (1, 2, 4)))
    (record,) = world.store.runs()
    assert (run.config.stop.rounds, run.state.rounds, run.config.stop.wall_time_s) == (12, 12, 1030.0)
    assert record.spec["stop"]["rounds"] == 12
    assert [entry.detail for entry in world.store.history("r") if entry.event == "run_extended"] == [
        "to 6 rounds", "to 8 rounds", "to 12 rounds",
    ]  # fmt: skip


async def test_an_extension_that_fails_takes_no_other_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two concurrent calls the first cannot be written: the second one counts, in memory and in the ledger."""
    run = await world.create(stop={"rounds": 5})
    await until(lambda: run.status == "waiting", "it waits")
    failures = iter([StoreFull("no room")])

    def fails_once(name: str) -> None:
        write = getattr(world.store, name)

        def method(*args: object) -> None:
            for failure in failures:
                raise failure
            write(*args)

        monkeypatch.setattr(world.store, name, method)

    fails_once("update_run")
    fails_once("add_history")
    calls = (world.coordinator.actions.extend(run, rounds, 0.0, "admin") for rounds in (1, 2))
    first, second = await asyncio.gather(*calls, return_exceptions=True)
    assert (type(first), second) == (StoreFull, None)
    (record,) = world.store.runs()
    assert run.config.stop.rounds == run.state.rounds == record.spec["stop"]["rounds"]


async def test_an_extension_that_cannot_be_written_has_no_effect(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator gets an error, and the next attempt adds its rounds exactly once."""
    run = await world.create(stop={"rounds": 5, "wall_time_s": 1000.0})

    def full(*_: object) -> None:
        raise StoreFull("no room")

    with monkeypatch.context() as patch:
        patch.setattr(world.store, "update_run", full)
        with pytest.raises(StoreFull):
            await world.coordinator.actions.extend(run, 2, 100.0, "admin")
    assert (run.config.stop.rounds, run.config.stop.wall_time_s, run.record.spec["stop"]["rounds"]) == (5, 1000.0, 5)
    await world.coordinator.actions.extend(run, 2, 100.0, "admin")
    assert (run.state.rounds, run.config.stop.wall_time_s) == (7, 1100.0)


async def test_two_extensions_at_once_both_count(world: World) -> None:
    """Of a run that has ended, so that its models are read again in between."""
    await connect(world, "a", "b", works=True)
    run = await world.create(**ONE_ROUND)
    await world.completed()
    await asyncio.gather(*(world.coordinator.actions.extend(run, rounds, 0.0, "admin") for rounds in (2, 3)))
    assert (run.state.rounds, run.config.stop.rounds, run.record.spec["stop"]["rounds"]) == (6, 6, 6)
    assert len(await world.completed()) == 6


async def test_an_extension_needs_rounds(world: World) -> None:
    """A run with all its rounds done cannot be extended by time alone."""
    await connect(world, "a", "b", works=True)
    run = await world.create(**ONE_ROUND)
    await world.completed()
    with pytest.raises(InvalidInput, match="rounds: expected rounds over 0: all 1 of the run are done, got 0"):
        await world.coordinator.actions.extend(run, 0, 60.0, "admin")
