"""ExportModel: the whole file of one checkpoint, also if the checkpoint is removed meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from blake3 import blake3

from fl_server.run.run import Run
from protos.fl.v1 import admin_pb2 as pb
from protos.fl.v1 import admin_pb2_grpc
from tests.fl_server.admin_stack import admin_channel
from tests.fl_server.devices import Device
from tests.fl_server.harness import TASK, World
from tests.marks import slow_except

BROAD = {"model": "broad"}
"""A model of several chunks."""


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A run of two rounds with one client; both checkpoints are there."""
    async with World(tmp_path) as world:
        await Device("a", options=BROAD).connect(world)
        await world.create(task={"name": TASK, "options": BROAD}, round={"clients_per_round": 1})
        await world.completed()
        yield world


async def parts_of(world: World, round_: str) -> AsyncIterator[pb.ExportModelResponse]:
    """The messages of an export."""
    async with admin_channel(world) as channel:
        call = admin_pb2_grpc.AdminStub(channel).ExportModel(pb.ExportModelRequest(run_id="r", round=round_))
        async for part in call:
            yield part


async def refusal_of(world: World, round_: str) -> grpc.aio.AioRpcError:
    """The error of an export."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in parts_of(world, round_):
            pass
    return caught.value


def remove(world: World, *keep: int) -> None:
    """Remove all checkpoints but these."""
    world.services.checkpoints.prune("r", set(keep))


@pytest.mark.slow
@pytest.mark.parametrize("round_", slow_except(["", "latest", "best", "1"], "best"))
async def test_a_model_is_exported_whole_although_it_is_removed(world: World, round_: str) -> None:
    """Its checkpoint is removed after the header: the bytes are those that the header announced."""
    parts = parts_of(world, round_)
    header = (await anext(parts)).header
    remove(world)
    content = b"".join([part.chunk.data async for part in parts])
    assert len(content) == header.size_bytes > 4 * world.config.limits.chunk_bytes
    assert blake3(content).digest() == header.digest.value


async def test_a_round_that_was_removed_is_not_found(world: World) -> None:
    """The error has the rounds that there are; a round that never was is a wrong value."""
    remove(world, 1)
    error = await refusal_of(world, "0")
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert error.details() == (
        "run 'r' has no model of round 0 any more, because older checkpoints are removed (keep_checkpoints): take one"
        ' of the rounds 1, or "latest" or "best"'
    )
    error = await refusal_of(world, "2")
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert '"latest", "best" or a kept round (1)' in (error.details() or "")


@pytest.mark.parametrize("round_", slow_except(["1", "best", "latest"], "latest"))
async def test_a_checkpoint_that_is_removed_before_it_is_opened_is_not_found(
    world: World, monkeypatch: pytest.MonkeyPatch, round_: str
) -> None:
    """Between the choice of the round and the opening of its file: no internal error."""
    choose = world.coordinator.model_round

    async def removing(run: Run, wanted: str) -> int:
        chosen = await choose(run, wanted)
        remove(world, -1)
        return chosen

    monkeypatch.setattr(world.coordinator, "model_round", removing)
    error = await refusal_of(world, round_)
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert "any more" in (error.details() or "")


async def test_the_latest_model_is_chosen_again_if_it_is_replaced(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit removed the checkpoint that was the latest one: the new latest one is exported."""
    choose, chosen = world.coordinator.model_round, list[int]()

    async def late(run: Run, wanted: str) -> int:
        chosen.append(0 if not chosen else await choose(run, wanted))
        return chosen[-1]

    monkeypatch.setattr(world.coordinator, "model_round", late)
    remove(world, 1)
    header = (await anext(parts_of(world, "latest"))).header
    assert (header.round.round, chosen) == (1, [0, 1])
