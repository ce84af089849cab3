"""A model whose buffer grows in training, over a restart of the coordinator."""

from __future__ import annotations

from pathlib import Path

import torch

from protos.codec import Layout, pack, unpack
from protos.fl.v1.training_pb2 import Receipt
from tests.fl_server.devices import Device, connect, update_message
from tests.fl_server.harness import World


async def deliver_grown(world: World, device: Device) -> Receipt:
    """Deliver an update whose buffer `running_mean` has one entry more than that of the model."""
    assignment = await device.assigned()
    _, layout, data = await device.fetch(world, assignment.resources[0].digest)
    values = dict(unpack(bytearray(data), layout))
    name = next(name for name in values if name.endswith("running_mean"))
    values[name] = torch.zeros(values[name].numel() + 1)
    grown = Layout.of(values, {entry.name for entry in layout.entries if entry.trainable})
    return await device._send(world, *update_message(assignment, grown, bytes(pack(values, grown))))


async def test_refusals_for_the_layout_before_and_after_a_restart_fail_the_run(tmp_path: Path) -> None:
    """One client is refused before the restart and the other after it: the run fails with the name of the buffer."""
    async with World(tmp_path) as world:
        await world.create(round={"clients_per_round": 2})
        a, _ = await connect(world, "a", "b")
        assert not (await deliver_grown(world, a)).admitted
    async with World(tmp_path) as world:
        _, b = await connect(world, "a", "b")
        assert not (await deliver_grown(world, b)).admitted
        run = await world.ended()
        assert run.status == "failed"
        assert "every update of round 0 was refused for its layout" in run.record.reason
        assert "running_mean" in run.record.reason
