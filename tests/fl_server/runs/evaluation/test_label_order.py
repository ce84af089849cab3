"""A client whose accuracy stays at chance while the others' rises is shown to operators."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fl_server.runs.evaluation.label_order import behind
from fl_server.store.records import ClientEvaluation
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


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A coordinator without clients."""
    async with World(tmp_path) as world:
        yield world


async def test_operators_see_note_and_history(world: World) -> None:
    """After two evaluations the client has a note, and the run's history one line."""
    devices = [await Device(name, eval_examples=50, works=True).connect(world) for name in "abc"]
    await world.create(stop={"rounds": 2}, evaluation={"clients_every": 1})
    for round_ in range(2):
        for device, accuracy in zip(devices, (0.9, 0.1, 0.8), strict=True):
            await device.asked_to_evaluate(round_)
            await device.report(world, 50, round_=round_, accuracy=accuracy)
    await world.completed()
    note = await until(lambda: getattr(world.fleet.known("b"), "note", ""), "it has a note")
    assert "its own accuracy stays at 0.10, the median of the others is 0.80" in note
    rows = await until(
        lambda: [row.detail for row in world.store.history("r") if row.event == "labels_suspected"], "it is in history"
    )
    assert [row.partition(":")[0] for row in rows] == ["b"]
