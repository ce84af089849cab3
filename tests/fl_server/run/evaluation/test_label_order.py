"""A client whose accuracy stays at chance while the others' rises is shown to operators."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from fl_server.run.totals import behind
from fl_server.store.records import ClientEvaluation
from protos.fl.v1 import admin_pb2 as pb
from protos.fl.v1 import admin_pb2_grpc
from tests.fl_server.admin_stack import admin_channel
from tests.fl_server.devices import Device
from tests.fl_server.harness import World, until


def answers(*accuracies: float, examples: int = 50) -> list[ClientEvaluation]:
    """Evaluations of clients a, b, c, ..."""
    return [
        ClientEvaluation("r", 0, name, examples, {"accuracy": each}, reported_at=0.0)
        for name, each in zip("abcd", accuracies, strict=False)
    ]


def test_a_client_that_stays_behind_is_found() -> None:
    """0.1 and 0.12 beside a median of 0.9."""
    assert behind(answers(0.9, 0.12, 0.95), answers(0.8, 0.1, 0.6)) == [("b", 0.12, 0.9)]


@pytest.mark.parametrize(
    ("now", "before"),
    [
        pytest.param(answers(0.9, 0.4, 0.95), answers(0.8, 0.1, 0.6), id="it-rises"),
        pytest.param(answers(0.9, 0.1, 0.9), [], id="seen-once"),
        pytest.param(answers(0.3, 0.1, 0.3), answers(0.3, 0.1, 0.3), id="all-are-low"),
        pytest.param(answers(0.9, 0.1), answers(0.9, 0.1), id="of-two-neither-is-known-to-be-wrong"),
        pytest.param(answers(0.9, 0.1, 0.9, examples=5), answers(0.9, 0.1, 0.9, examples=5), id="few-examples"),
    ],
)
def test_other_clients_are_not(now: list[ClientEvaluation], before: list[ClientEvaluation]) -> None:
    """Slow ones, single measurements, and those that nothing can be compared with."""
    assert behind(now, before) == []


async def rounds(world: World, devices: Sequence[Device], *numbers: int) -> None:
    """These rounds, each with its evaluation before the next one is trained: a third would end it early.

    Client b stays at 0.1.
    """
    for number in numbers:
        for device in devices:
            await device.contribute(world, await device.assigned(number))
        await evaluated(world, devices, number)


async def evaluated(world: World, devices: Sequence[Device], round_: int) -> None:
    """The reports on the model of a round."""
    for device, accuracy in zip(devices, (0.9, 0.1, 0.8), strict=True):
        await device.asked_to_evaluate(round_)
        await device.report(world, 50, round_=round_, accuracy=accuracy)


async def told(world: World) -> list[str]:
    """The clients in the run's history, once there is one."""

    def probe() -> list[str]:
        return [row.detail for row in world.store.history("r") if row.event == "labels_suspected"]

    return [detail.partition(":")[0] for detail in await until(probe, "it is in the history")]


async def test_operators_see_note_and_history(tmp_path: Path) -> None:
    """It has a note, a number in the overview and one line of history after two evaluations, and after a restart."""
    devices = [Device(name, eval_examples=50, works=False) for name in "abc"]
    async with World(tmp_path) as world:
        for device in devices:
            await device.connect(world)
        run = await world.create(stop={"rounds": 3}, evaluation={"clients_every": 1}, round={"clients_per_round": 3})
        await rounds(world, devices, 0, 1)
        await until(lambda: run.context.label_order.suspected, "it is found")
        for device in devices:
            await device.contribute(world, await device.assigned(2))
        for device in devices:
            await device.asked_to_evaluate(2)  # of the model that another commit made
        note = getattr(world.fleet.records.find("b"), "note", "")
        assert "its own accuracy stays at 0.10, the median of the others is 0.80" in note
        assert await told(world) == ["b"]
    async with World(tmp_path) as world:
        async with admin_channel(world) as channel:
            seen = await admin_pb2_grpc.AdminStub(channel).GetOverview(pb.GetOverviewRequest())
        assert [run.labels_suspected for run in seen.runs] == [1]
        for device in devices:
            await device.connect(world)
            await device.asked_to_evaluate(2, times=2)
        await evaluated(world, devices, 2)
        await world.completed()
        assert await told(world) == ["b"]
