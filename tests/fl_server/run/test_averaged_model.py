"""The averaged model of a coordinator's run: its bits after a kill, after an extension, and in an export."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load

from algorithms.model_state import read_state
from fl_server.errors import InvalidInput
from fl_server.rpc.admin import AdminService
from fl_server.store.database.store import open_read_only
from protos.codec import Layout, digest_text, pack
from protos.fl.v1 import admin_pb2 as pb
from tests.fl_server.devices import Device
from tests.fl_server.harness import World, ledger_file, until
from tests.fl_server.killed_runs import NAMES, complete_run, run_with_kill
from tests.marks import slow_except
from tests.processes.tiny_task import batchnorm

ROUNDS = 4
RULES: dict[str, dict[str, Any]] = {
    "ema": {"method": "ema", "decay": 0.7},
    "tail": {"method": "tail", "start": 1},
    "window": {"method": "window", "window": 2},
}
WINDOW: dict[str, Any] = {"averaging": RULES["window"], "stop": {"rounds": ROUNDS}, "keep_checkpoints": ROUNDS}
WRITES = 6 + 2 + (8 + 1) * ROUNDS + 2
"""Registrations, the creation, the writes of each round and of its evaluation, and of the run's state."""
Files = dict[str, bytes]
CONTEXT: Any = None


def averaged_files(folder: Path) -> Files:
    """The files of the averaged models, by round and name."""
    paths = folder.glob("**/run-r/round-*/*")
    return {
        f"{path.parent.name}/{path.name}": path.read_bytes()
        for path in paths
        if path.name.startswith(("averaged", "sum-"))
    }


def averaged_digests(folder: Path) -> list[str | None]:
    """The digests of the averaged models in the ledger, by round."""
    with closing(open_read_only(folder)) as ledger:
        return [commit.averaged_digest for commit in ledger.commits("r")]


def digests_of_files(files: Files) -> list[str]:
    """The digests of the averaged models in these files, by round, as of the bundles that clients fetch."""
    found = []
    for name in sorted(name for name in files if name.endswith("averaged.safetensors")):
        module = batchnorm()
        module.load_state_dict(load(files[name]))
        state = read_state(module)
        layout = Layout.of({**state.trainable, **state.buffers}, state.trainable.keys())
        found.append(digest_text(layout.digest(pack({**state.trainable, **state.buffers}, layout))))
    return found


@pytest.fixture(scope="module")
def undisturbed_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Files]:
    """The outcome of a run without a kill, and its averaged models."""
    folder = tmp_path_factory.mktemp("undisturbed")
    outcome, _, _ = asyncio.run(run_with_kill(folder, **WINDOW))
    return outcome, averaged_files(folder)


DEATHS = range(9, WRITES + 1)


@pytest.mark.parametrize("dies_at", slow_except([*DEATHS, "save"], 14, "save"))
async def test_a_kill_after_any_write_changes_no_bit(
    tmp_path: Path, undisturbed_files: tuple[Any, Files], dies_at: int | str
) -> None:
    """Models, the metrics of both models, and all files of the averaged models are equal, and the ledger names them."""
    outcome, _, _ = await run_with_kill(tmp_path, dies_at, **WINDOW)
    expected, files = undisturbed_files
    assert outcome == expected
    assert averaged_files(tmp_path) == files
    assert averaged_digests(tmp_path) == digests_of_files(files)
    assert len(files) == 3 + 3 * (ROUNDS - 1) - 1  # the second sum begins in round 1


async def test_sums_of_another_model_are_not_continued(tmp_path: Path) -> None:
    """A checkpoint whose averaged model is not the ledger's: the run is not extended, and the message names both."""
    devices = [Device(name) for name in NAMES]
    async with World(tmp_path) as world:
        await complete_run(world, devices, averaging=RULES["window"], stop={"rounds": 2})
    with closing(sqlite3.connect(ledger_file(tmp_path))) as ledger:
        ledger.execute("UPDATE commits SET averaged_digest = 'blake3:00' WHERE round = 1")
        ledger.commit()
    async with World(tmp_path) as world:
        with pytest.raises(
            InvalidInput, match="averaged model of round 1 is blake3:00 in the ledger, .* blake3:[0-9a-f]+"
        ):
            await world.coordinator.actions.extend(world.coordinator.run("r"), 2, 0.0, "admin")


async def exported(world: World, round_: str, model: str = "") -> bytes:
    """The file of an exported model."""
    request = pb.ExportModelRequest(run_id="r", round=round_, model=model)
    messages = AdminService(world.services, world.coordinator).ExportModel(request, CONTEXT)
    return b"".join([each.chunk.data async for each in messages])


@pytest.mark.parametrize("rule", slow_except(RULES, "window"))
async def test_it_is_the_float64_mean_of_the_exported_models(tmp_path: Path, rule: str) -> None:
    """Summed in the order of the rounds and rounded once, bit for bit; integer buffers are those of the latest model.

    In its second half, the run was continued by another coordinator and extended.
    """
    devices = [Device(name) for name in NAMES]
    averaging = RULES[rule]
    async with World(tmp_path) as world:
        await complete_run(world, devices, averaging=averaging, stop={"rounds": 2}, keep_checkpoints=ROUNDS)
    async with World(tmp_path) as world:
        for device in devices:
            await device.connect(world)
        await world.coordinator.actions.extend(world.coordinator.run("r"), ROUNDS - 2, 0.0, "admin")
        await world.completed()
        models = [load(await exported(world, str(round_))) for round_ in range(ROUNDS)]
        averaged = load(await exported(world, "latest", "averaged"))
    decay = averaging.get("decay")
    first = {"ema": 0, "tail": 1, "window": 2}[rule]
    keep, take = (1.0, 1.0) if decay is None else (decay, 1 - decay)
    for name, latest in models[-1].items():
        if not latest.is_floating_point():
            assert torch.equal(averaged[name], latest)
            continue
        total = models[first][name].double() * take
        for model in models[first + 1 :]:
            total = total * keep + model[name].double() * take
        mean = total / (ROUNDS - first if decay is None else 1 - decay**ROUNDS)
        assert torch.equal(averaged[name], mean.to(latest.dtype))
        assert not torch.equal(averaged[name], latest)


async def test_an_export_names_its_model(tmp_path: Path) -> None:
    """In the header of the file, and in the history; a round without an averaged model is refused."""
    devices = [Device(name) for name in NAMES]
    sections = {"averaging": RULES["tail"], "keep_checkpoints": 2, "evaluation": {"every": 0}}
    async with World(tmp_path) as world:
        await complete_run(world, devices, **sections)
        held = {}
        for model in ("", "committed", "averaged"):
            path = tmp_path / f"{model}.safetensors"
            path.write_bytes(await exported(world, "1", model))
            with safe_open(path, framework="pt") as file:
                held[model] = file.metadata()["holds"]
        assert held == {"": "committed", "committed": "committed", "averaged": "averaged"}
        with pytest.raises(InvalidInput, match="a round from 1 on"):
            await exported(world, "0", "averaged")
        with pytest.raises(InvalidInput, match='"committed" or "averaged"'):
            await exported(world, "1", "mean")
        exports = [entry.detail for entry in world.store.history("r") if entry.event == "model_exported"]
        assert [detail.partition(", blake3:")[0] for detail in exports] == ["round 1", "the averaged model of round 1"]


def checkpoint_of(folder: Path, round_: int) -> tuple[list[str], dict[str, str]]:
    """The files of a checkpoint, and what the header of its model says."""
    [path] = folder.glob(f"**/run-r/round-{round_:06d}")
    with safe_open(path / "model.safetensors", framework="pt") as file:
        return sorted(each.name for each in path.iterdir()), file.metadata()


async def test_a_run_without_averaging_has_no_file_of_it(tmp_path: Path) -> None:
    """Its files are those that it had before there were averaged models, and an export of one is refused."""
    devices = [Device(name) for name in NAMES]
    async with World(tmp_path) as world:
        await complete_run(world, devices)
        with pytest.raises(InvalidInput, match="which has no section"):
            await exported(world, "latest", "averaged")
    assert averaged_digests(tmp_path) == [None] * 2
    names, metadata = checkpoint_of(tmp_path, 1)
    assert names == ["memory-Delta.safetensors", "meta.json", "model.safetensors"]
    assert metadata == {"format": "pt"}


async def test_the_best_round_can_be_that_of_the_averaged_model(tmp_path: Path) -> None:
    """A rule by a metric of the averaged model selects the best round and ends the run."""
    devices = [Device(name) for name in NAMES]
    stop = {"rounds": 9, "metric": "averaged_accuracy", "target": 0.01}
    async with World(tmp_path) as world:
        await complete_run(world, devices, averaging=RULES["tail"], stop=stop)
        run = world.coordinator.run("r")
        await until(lambda: run.rounds.best, "it is evaluated")
        assert run.rounds.best is not None
        assert run.rounds.best.round >= 1
        assert "averaged_accuracy reached" in str(run.state.ending)
        assert world.metric("fl_evaluation", run="r", metric="averaged_accuracy") == run.rounds.best.value
