"""A run whose client states an older version made with the wrong weights restarts them once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fl_server.devices import Device
from tests.fl_server.harness import World, until


@pytest.mark.parametrize(
    ("facts", "objective", "examples", "restarts"),
    [
        pytest.param("old", "uniform", 50, 1, id="wrong-weights"),
        pytest.param("new", "uniform", 50, 0, id="this-version"),
        pytest.param("old", "examples", 50, 0, id="weighted-objective", marks=pytest.mark.slow),
        pytest.param("old", "uniform", 0, 0, id="no-number-of-examples", marks=pytest.mark.slow),
    ],
)
async def test_states_made_by_an_older_version(
    tmp_path: Path, facts: str, objective: str, examples: int, restarts: int
) -> None:
    """Its checkpoints lack a fact that later ones have. Only SCAFFOLD's run with the wrong weights is affected."""
    sections: dict[str, Any] = {
        "algorithm": {"name": "scaffold", "parameters": {"objective": objective}},
        "population": 2,
        "population_examples": examples,
        "stop": {"rounds": 4},
    }
    devices = [Device(name) for name in "ab"]
    async with World(tmp_path) as world:
        for device in devices:
            await device.connect(world)
        run = await world.create(**sections)
        await until(lambda: run.log.rounds, "a round is committed")
    if facts == "old":
        checkpoints = world.services.checkpoints
        for round_ in checkpoints.rounds("r"):
            saved = checkpoints.of_round("r", round_)
            assert saved is not None
            kept = {name: value for name, value in saved.facts.items() if name != "weighed_by_objective"}
            checkpoints.save("r", round_, replace(saved, facts=kept))
    for _ in range(2):  # the second start finds checkpoints of this version
        async with World(tmp_path) as world:
            for device in devices:
                await device.connect(world)
            await until(lambda: world.coordinator.run("r").log.rounds >= 2, "another round is committed")
    async with World(tmp_path) as world:
        for device in devices:
            await device.connect(world)
        await world.completed()
        events = [entry.event for entry in world.store.history("r")]
        assert events.count("states_restarted") == restarts
        assert world.coordinator.run("r").record.state_epoch == restarts
