"""Creation of runs: their ids, and what is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode

from fl_server.aggregation.engine import Engine
from fl_server.audit.calls import code_of
from fl_server.errors import InvalidInput, NoSuchResource, NoSuchRun, RunExists
from tests.fl_server.harness import TASK, World


async def test_run_ids_are_unique(world: World) -> None:
    """A name in use is refused; runs without a name are numbered, also if they are created at the same time."""
    await world.create(name="r")
    with pytest.raises(RunExists, match="a run 'r' exists already"):
        await world.create(name="r")
    created = await asyncio.gather(*(world.create(name="") for _ in range(3)))
    base = "tests.processes.tiny_task-tiny-fedcm"
    assert [run.id for run in created] == [f"{base}-1", f"{base}-2", f"{base}-3"]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"task": {"name": "digitz"}}, r'^task: expected a built-in task .*, got "digitz". Did you mean "digits"'),
        (
            {"algorithm": {"name": "fedcn"}},
            r'expected a built-in .*, got "fedcn". Did you mean "fedcm"',
        ),
        (
            {"algorithm": {"name": "fedcm", "parameters": {"alpha": 2}}},
            r"^algorithm\.parameters\.alpha: .*parameter 'alpha': expected .*; got 2",
        ),
        (
            {"algorithm": {"name": "fedcm", "parameters": {"alfa": 1}}},
            r"^algorithm\.parameters\.alfa: expected .* Did you mean 'alpha'",
        ),
        (
            {"algorithm": {"name": "fedrobust", "parameters": {"eta_2": 9.0}}},
            r"^algorithm\.parameters: .*eta_2 < 1",
        ),
        (
            {"task": {"name": TASK, "options": {"model": "complex_numbers"}}},
            r"^task: .*tensor '0\.weight': expected a dtype of .*, got torch\.complex64",
        ),
        (
            {"task": {"name": TASK, "options": {"model": "all_frozen"}}},
            "^task: .*a model with trainable parameters, got none",
        ),
        ({"initial_model": "/nowhere.safetensors"}, "initial_model: expected one that you may use"),
        (
            {"round": {"close": "buffer", "goal": 2, "staleness": {"kind": "mine:halving"}}},
            r"^round\.staleness\.kind: expected a staleness that this coordinator may load: built in \(constant, pol",
        ),
        (
            {"task": {"name": "cifar10", "options": {"data_root": "/etc"}}},
            r"^task\.options\.data_root: expected no value",
        ),
        ({"task": {"name": "cifar10", "options": {"download": True}}}, r"^task\.options\.download: expected no value"),
        ({"task": {"name": "shakespeare", "options": {"base": "/x"}}}, r"^task\.options\.base: .* server\.toml"),
    ],
)
async def test_an_invalid_run_is_refused_at_its_creation(world: World, sections: dict[str, Any], message: str) -> None:
    """The error names the wrong setting; nothing is stored."""
    with pytest.raises(InvalidInput, match=message):
        await world.create(**sections)
    assert (world.coordinator.runs(), world.store.runs()) == ([], [])


async def test_a_model_over_the_limits_is_refused_when_the_run_is_created(tmp_path: Path) -> None:
    """One that is too large itself, and one that does not fit beside those of the runs under way."""
    broad = {"name": TASK, "options": {"model": "broad"}}
    async with World(tmp_path / "small", max_model_mib=1) as world:
        with pytest.raises(InvalidInput, match=r"at most 1 MiB, got \d+ bytes or more.*limits.max_model_mib"):
            await world.create(task={"name": TASK, "options": {"model": "frozen"}})
    async with World(tmp_path / "full", max_models_mib=1) as world:
        first = await world.create(name="first", task=broad)
        await world.create(name="second", task=broad)
        with pytest.raises(InvalidInput, match=r"limits.max_models_mib"):
            await world.create(name="third", task=broad)
        await world.coordinator.actions.stop(first, "makes room", "test")
        await world.ended("first")
        await world.create(name="third", task=broad)


async def test_a_fault_is_not_blamed_on_a_field(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ValueError of the coordinator's own code is an internal error: its caller can correct nothing."""

    def broken(*_: Any) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(Engine, "outgoing", broken)
    with pytest.raises(ValueError, match="^a bug$") as caught:
        await world.create()
    assert code_of(caught.value) is StatusCode.INTERNAL
    assert (world.coordinator.runs(), world.store.runs()) == ([], [])


async def test_unknown_runs_and_resources_are_refused(world: World) -> None:
    """The errors name the next step."""
    with pytest.raises(NoSuchRun, match="no run 'x'; `fl run list` shows"):
        world.coordinator.run("x")
    with pytest.raises(NoSuchResource, match="its round is over; wait for a new assignment"):
        world.coordinator.resource(bytes(32), "", "a")
