"""Whole runs whose coordinator is killed once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.fl_server.devices import Device
from tests.fl_server.harness import Journal, World, until

NAMES = ("a", "b", "c")
Outcome = tuple[list[str], list[Mapping[str, float]], list[list[tuple[str, bytes]] | None]]
"""Model digests, metrics and accepted lists of a run, by round."""
Undisturbed = tuple[Outcome, list[str]]
"""The outcome of a run without a kill, and its writes."""


async def complete_run(world: World, devices: list[Device], **sections: Any) -> list[str]:
    """Connect the devices, create the run unless it exists, and wait for its end."""
    for device in devices:
        await device.connect(world)
    if not world.coordinator.runs():
        await world.create(**sections)
    return await world.completed()


@asynccontextmanager
async def completed_after_kill(
    folder: Path, devices: list[Device], dies_at: int | str | None, **sections: Any
) -> AsyncIterator[tuple[World, list[str]]]:
    """A run that is complete, with its model digests. Its coordinator was killed once, unless dies_at is None."""
    if dies_at is not None:
        async with World(folder, Journal(dies_at)) as world:
            world.spawn(complete_run(world, devices, **sections))
            await until(lambda: world.journal.dead, "the coordinator is killed")
        devices[0].kept.clear()
    async with World(folder) as world:
        yield world, await complete_run(world, devices, **sections)


async def run_with_kill(
    folder: Path, dies_at: int | str | None = None, **sections: Any
) -> tuple[Outcome, list[Device], list[str]]:
    """The outcome of a run whose coordinator was killed once, its devices, and the writes."""
    devices = [Device(name) for name in NAMES]
    async with completed_after_kill(folder, devices, dies_at, **sections) as (world, digests):
        await until(lambda: all(commit.metrics for commit in world.store.commits("r")), "it is evaluated")
        metrics = [commit.metrics for commit in world.store.commits("r")]
        accepted = [world.store.accepted("r", round_, 0) for round_ in range(len(digests))]
        assert [commit.model_digest for commit in world.store.commits("r")] == digests
        of_clients = sum(client.work.admitted for client in world.store.clients())
        lists = [world.store.accepted("r", round_, exchange) for round_ in range(len(digests)) for exchange in (0, 1)]
        assert of_clients == sum(len(fixed or ()) for fixed in lists), "each accepted update is counted once"
        return (digests, metrics, accepted), devices, world.journal.writes
