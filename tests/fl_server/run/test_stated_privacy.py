"""What devices state that their data has spent: shown for a run, in lists and as a metric, and kept by a restart."""

from __future__ import annotations

from pathlib import Path

from fl_server.privacy_accounts import Stated
from fl_server.rpc.admin import AdminService
from fl_server.store.client_work import ClientWork
from protos.fl.v1 import admin_pb2 as pb
from protos.fl.v1.training_pb2 import Assignment, UpdateHeader
from tests.fl_server.devices import NO_CONTEXT, Device
from tests.fl_server.harness import World

PRIVACY = {"unit": "record", "noise_multiplier": 1.5, "clip": 0.5, "delta": 1e-5}
PLAIN = {"name": "tests.processes.tiny_task:Tiny", "options": {"model": "plain"}}


class StatingDevice(Device):
    """A device whose updates state an epsilon; None: it does not share it."""

    epsilon: float | None = None

    async def update(self, world: World, assignment: Assignment) -> tuple[UpdateHeader, bytes]:
        """See Device."""
        header, data = await super().update(world, assignment)
        header.privacy.applied.CopyFrom(assignment.training.privacy)
        if self.epsilon is not None:
            header.privacy.epsilon = self.epsilon
        header.ClearField("training_loss")
        return header, data


def test_they_are_counted_without_those_that_state_none() -> None:
    """The delta is that of the largest; devices may have other deltas, for their sites demand them."""
    works = [ClientWork(), ClientWork().stating(0.5, 1e-5), ClientWork().stating(2.0, 1e-6)]
    assert Stated.of(works) == (2, 1.25, 2.0, 1e-6)
    assert Stated.of([*works, ClientWork().stating(None, 1e-5)]) == (2, 1.25, 2.0, 1e-6)
    assert Stated.of([ClientWork()]) is None


async def seen(world: World) -> tuple[pb.StatedPrivacy, list[float], list[str]]:
    """The run's summary, the metric, and the clients by epsilon."""
    admin = AdminService(world.services, world.coordinator)
    run = (await admin.GetRun(pb.GetRunRequest(run_id="r"), NO_CONTEXT)).run
    request = pb.ListClientsRequest(order=pb.CLIENT_ORDER_EPSILON, descending=True)
    clients = (await admin.ListClients(request, NO_CONTEXT)).clients
    values = [world.metric("fl_privacy_stated_epsilon", run="r", statistic=name) for name in ("median", "largest")]
    return run.stated_privacy, values, [client.client_id for client in clients]


async def test_a_run_shows_them_and_a_restart_changes_nothing(tmp_path: Path) -> None:
    """Three devices, one of which does not share. Whoever states none comes last in the list."""
    async with World(tmp_path) as world:
        for name, epsilon in (("a", 0.5), ("b", None), ("c", 2.5)):
            device = StatingDevice(name, options={"model": "plain"})
            device.epsilon = epsilon
            await device.connect(world)
        await world.create(
            task=PLAIN, privacy=PRIVACY, stop={"rounds": 2}, round={"clients_per_round": 3}, local={"steps": 2}
        )
        assert (await seen(world))[:2] == (pb.StatedPrivacy(), [0.0, 0.0])
        await world.completed()
        before = await seen(world)
    assert before == (
        pb.StatedPrivacy(clients=2, median=1.5, largest=2.5, delta=1e-5), [1.5, 2.5], ["c", "a", "b"]
    )  # fmt: skip
    async with World(tmp_path) as world:
        assert await seen(world) == before
