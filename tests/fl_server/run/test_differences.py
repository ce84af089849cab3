"""Differences between the bundles of a run's rounds, through a whole coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from protos.differences import apply_difference
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.tensor_pb2 import (
    ENCODING_PLAIN,
    RESOURCE_KIND_MODEL,
    Digest,
    Manifest,
    Resource,
    ResourceKind,
)
from protos.fl.v1.training_pb2 import Assignment
from tests.fl_server.devices import NO_CONTEXT, Device
from tests.fl_server.harness import TASK, World, until

BROAD = {"model": "broad"}
PREVIOUS: dict[str, Any] = {
    "task": {"name": TASK, "options": BROAD},
    "round": {"clients_per_round": 1},
    "stop": {"rounds": 3},
    "encodings": {"difference": "previous"},
}


class Holder(Device):
    """A client that keeps the bytes of all bundles of its latest assignment."""

    held: dict[ResourceKind, tuple[bytes, bytes]]
    """Digest and bytes, by kind."""

    async def download(self, world: World, digest: Digest) -> tuple[Manifest, bytes]:
        """Manifest and bytes of a resource or a difference."""
        request = pb.FetchModelRequest(session_id=self.session, digest=digest)
        parts = [pb.FetchModelResponse.FromString(each) async for each in world.service.FetchModel(request, NO_CONTEXT)]
        return parts[0].header.manifest, b"".join(part.chunk.data for part in parts[1:])

    async def bundle(self, world: World, resource: Resource) -> tuple[bytes, bool]:
        """The bytes of a resource, and whether it has a difference, which must make them of those held before."""
        _, whole = await self.download(world, resource.digest)
        digest, base = self.held.get(resource.kind, (b"", b""))
        if not resource.HasField("difference") or digest == resource.digest.value:
            return whole, resource.HasField("difference")
        assert resource.difference.base.value == digest
        manifest, difference = await self.download(world, resource.difference.digest)
        assert manifest == Manifest(size_bytes=resource.difference.size_bytes, encoding=ENCODING_PLAIN)
        made = bytearray(len(whole))
        apply_difference(base, difference, resource.difference.word_bytes, memoryview(made))
        assert made == whole
        return whole, True

    async def take(self, world: World, assignment: Assignment) -> dict[ResourceKind, bool]:
        """Fetch an assignment's bundles. Returns which of them have a difference."""
        came = {each.kind: (each.digest.value, *(await self.bundle(world, each))) for each in assignment.resources}
        self.held = {kind: (digest, data) for kind, (digest, data, _) in came.items()}
        return {kind: had for kind, (_, _, had) in came.items()}


async def holder(world: World) -> Holder:
    """A connected client that holds nothing."""
    device = Holder("a", options=BROAD, works=False)
    device.held = {}
    return await device.connect(world)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedcm", "mime"])
async def test_each_round_s_difference_makes_its_bundle(tmp_path: Path, method: str) -> None:
    """Of the bundle of the round before, although a plain one is the memory of the model itself.

    Mime sends its model in the first of two exchanges, and the second names it again.
    """
    exchanges, had = (2 if method == "mime" else 1), []
    async with World(tmp_path) as world:
        a = await holder(world)
        await world.create(**{**PREVIOUS, "algorithm": {"name": method}})
        for round_ in range(3):
            for exchange in range(exchanges):
                assignment = await a.assigned(round_, exchange)
                had.append((await a.take(world, assignment))[RESOURCE_KIND_MODEL])
                await a.contribute(world, assignment)
    assert had == [False] * exchanges + [True] * 2 * exchanges


async def test_without_the_setting_nothing_is_announced(tmp_path: Path) -> None:
    """Resources are as before."""
    async with World(tmp_path) as world:
        a = await holder(world)
        await world.create(**{**PREVIOUS, "encodings": {}})
        for round_ in range(2):
            assignment = await a.assigned(round_)
            assert not any(each.HasField("difference") or each.is_base for each in assignment.resources)
            await a.contribute(world, assignment)


async def test_a_restart_sends_whole_bundles_once(tmp_path: Path) -> None:
    """The coordinator has only the latest model. The round after has a difference again."""
    async with World(tmp_path) as world:
        a = await holder(world)
        await world.create(**PREVIOUS)
        await a.take(world, await a.assigned())
        await a.contribute(world, await a.assigned())
        before = await a.assigned(1)
        assert await a.take(world, before) == dict.fromkeys(a.held, True)
    async with World(tmp_path) as world:
        await a.connect(world)
        await until(lambda: a.pushed("assignment")[-1] != before, "the work is sent again")
        again = await a.assigned(1)
        assert [each.digest for each in again.resources] == [each.digest for each in before.resources]
        assert await a.take(world, again) == dict.fromkeys(a.held, False)
        await a.contribute(world, again)
        assert (await a.take(world, await a.assigned(2)))[RESOURCE_KIND_MODEL]


async def test_a_round_that_is_prepared_again_sends_the_same(tmp_path: Path) -> None:
    """A client that holds the bundle of the round before still gets the difference to it."""
    async with World(tmp_path) as world:
        a = await holder(world)
        run = await world.create(**PREVIOUS)
        await a.contribute(world, await a.assigned())
        await a.assigned(1)
        before = run.model.broadcasts
        await run.model.prepare(0)
        assert run.model.broadcasts == before
        assert all(each.difference is not None for each in before if each.kind == "model")


async def test_the_bytes_of_a_difference_are_those_that_are_counted(tmp_path: Path) -> None:
    """In the round's commit and in the metric of models: what was sent, not what was described."""
    async with World(tmp_path) as world:
        a = await holder(world)
        run = await world.create(**{**PREVIOUS, "algorithm": {"name": "fedavg"}})
        await a.contribute(world, await a.assigned())
        [model] = (await a.assigned(1)).resources
        counted = world.metric("fl_transfer_bytes_total", direction="down", kind="model")
        assert counted == run.rounds.recent[0].bytes_down == model.size_bytes
        await a.download(world, model.difference.digest)
        assert run.rounds.bytes.down == model.difference.size_bytes < model.size_bytes
        sent = world.metric("fl_transfer_bytes_total", direction="down", kind="model") - counted
        assert sent == model.difference.size_bytes
