"""What a run awaits and what it lacks, as operators see it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from fl_server.rpc.views import run_status
from fl_server.run.run import Run
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.tensor_pb2 import ENCODING_BF16, ENCODING_INT8, ENCODING_PLAIN
from tests.fl_server.devices import Device
from tests.fl_server.harness import TASK, World, until

OTHER = pb.TaskOffer(name="other-task", train_examples=3)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A coordinator without clients."""
    async with World(tmp_path, reattach_grace_s=600) as world:
        yield world


class Offering(Device):
    """A device that registers with other values."""

    changes: dict[str, Any]

    def registration(self, **changes: Any) -> pb.RegisterRequest:
        """With the changes of this device."""
        return super().registration(**self.changes, **changes)


async def offering(world: World, name: str, **changes: Any) -> Device:
    """A connected device that registered with these changes."""
    device = Offering(name, works=False)
    device.changes = changes
    return await device.connect(world)


async def waits_for(run: Run, expected: str) -> None:
    """Wait until the run waits, and lacks exactly this."""
    await until(lambda: run.status == "waiting", "it waits")
    shown = run_status(run)
    assert shown.waiting_for == expected
    if not expected.startswith("clients that could be drawn: "):
        assert shown.reason.startswith(f"clients that could be drawn: 0 of 2 here; it lacks {expected}")


async def test_a_killed_daemon_is_named_with_the_time_left(world: World) -> None:
    """The cohort's clients without an update are awaited, also one that is gone and may come back."""
    a, b = [await Device(name, works=False).connect(world) for name in "ab"]
    run = await world.create(round={"clients_per_round": 2, "deadline_s": 900})
    await a.contribute(world, await a.assigned())
    await b.assigned()
    await b.leave()
    status = run_status(run)
    assert (status.phase, list(status.awaited), status.awaited_count) == ("collecting", ["b"], 1)
    assert 0 < status.deadline_left_s <= 900
    assert not status.waiting_for


async def test_the_first_ten_awaited_clients_are_named(world: World) -> None:
    """All are counted."""
    for number in range(12):
        await Device(f"d{number:02}", works=False).connect(world)
    run = await world.create(round={"clients_per_round": 12})
    await until(lambda: run.state.outstanding, "a cohort is drawn")
    status = run_status(run)
    assert list(status.awaited) == [f"d{number:02}" for number in range(10)]
    assert status.awaited_count == 12


async def test_clients_that_evaluate_are_awaited(world: World) -> None:
    """After the last round the run waits for the clients' evaluation, until its own deadline."""
    a = await Device("a", eval_examples=5).connect(world)
    run = await world.create(
        round={"clients_per_round": 1}, stop={"rounds": 1}, evaluation={"clients_every": 1, "clients_deadline_s": 700}
    )
    await until(lambda: a.pushed("evaluation"), "it is asked")
    await until(lambda: run_status(run).phase == "evaluating", "the run waits for it")
    status = run_status(run)
    assert list(status.awaited) == ["a"]
    assert 0 < status.deadline_left_s <= 700


async def test_a_run_without_clients_lacks_clients(world: World) -> None:
    """No client is here."""
    run = await world.create()
    await waits_for(run, "clients: none is here")
    status = run_status(run)
    assert not status.awaited
    assert not status.HasField("deadline_left_s")


async def test_a_task_that_nobody_offers_is_named(world: World) -> None:
    """With the tasks that are offered instead."""
    await offering(world, "a", tasks=[OTHER])
    await waits_for(
        await world.create(),
        f"clients with the task {TASK!r}: 0 of 1 here offer it; offered: 'other-task'",
    )


async def test_labels_that_nobody_has_are_named(world: World) -> None:
    """The clients with the task lack the labels."""
    await offering(world, "a", labels={"region": "us"})
    await offering(world, "b", tasks=[OTHER], labels={"region": "eu"})
    await waits_for(
        await world.create(labels={"region": "eu"}),
        f"clients with the labels region=eu: 0 of 1 here with the task {TASK!r} have them",
    )


async def test_too_few_clients_are_counted_with_the_reasons_of_the_others(world: World) -> None:
    """One can be drawn; the others may not train, drain, or have another version of the task."""
    await offering(world, "a")
    await offering(world, "b", availability=pb.Availability(may_train=False, detail="on battery"))
    await offering(world, "c")
    await world.operators.drain("c", "repair", False, "admin")
    old = Device("d").registration().tasks[0]
    old.fingerprint.version = "old"
    await offering(world, "d", tasks=[old])
    run = await world.create(round={"clients_per_round": 2, "min_clients": 3})
    await waits_for(
        run,
        "clients that could be drawn: 1 of 3 here; 1 with another version of the task's code; 1 draining; "
        "1 reports that it may not train (1 other)",
    )


async def test_a_daemon_without_the_run_s_encodings_is_not_drawn(world: World) -> None:
    """One that knows another encoding, and an older one that names none. Operators see which it lacks."""
    old = await offering(world, "old", software="impetus 0.0.1")
    other = await offering(world, "other", encodings=[ENCODING_PLAIN, ENCODING_INT8])
    with capture_logs() as logs:
        run = await world.create(
            round={"clients_per_round": 1}, encodings={"update": "int8", "model": "bf16"}, name="encoded"
        )
        lacks = "2 without encodings of this run (1 bf16, 1 bf16 and int8)"
        await waits_for(run, f"clients that could be drawn: 0 of 1 here; {lacks}")
    [waits] = [line["why"] for line in logs if line["event"] == "run_waits"]
    assert f"{lacks}, first old: impetus 0.0.1; update its daemon" in waits
    able = await offering(world, "able", encodings=[ENCODING_INT8, ENCODING_BF16])
    assert (await able.assigned()).key.run_id == "encoded"
    await world.create(name="plain", round={"clients_per_round": 2})
    assert {(await each.assigned()).key.run_id for each in (old, other)} == {"plain"}


async def test_an_encoding_of_the_future_is_ignored(world: World) -> None:
    """A newer daemon names it; it takes part in what this coordinator knows."""
    new = await offering(world, "new", encodings=[99, ENCODING_INT8])
    await world.create(round={"clients_per_round": 1}, encodings={"update": "int8"})
    assert list((await new.assigned()).upload_encodings) == [ENCODING_INT8]


async def test_clients_at_work_for_another_run_write_no_history(world: World) -> None:
    """A run waits for three clients, and the two here come and go for another run: its history has one wait."""
    for name in ("a", "b"):
        await Device(name).connect(world)
    waiting = await world.create(name="waiting", round={"clients_per_round": 3, "min_clients": 3})
    await until(lambda: waiting.status == "waiting", "it waits")
    other = await world.create(name="other", round={"clients_per_round": 2, "min_clients": 2}, stop={"rounds": 6})
    await until(lambda: other.ended, "the other run ends")
    assert len([entry for entry in world.store.history("waiting") if entry.event == "run_waits"]) == 1
    await waits_for(waiting, "clients that could be drawn: 2 of 3 here")
    await Device("c").connect(world)
    await until(lambda: waiting.rounds.committed, "it goes on")
