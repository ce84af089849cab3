"""The numbers of a client that operators see: its counted updates, and when it was seen last."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest

from fl_server.rounds import events as ev
from fl_server.rounds.state import Phase
from protos.fl.v1 import admin_pb2 as pb
from protos.fl.v1 import admin_pb2_grpc, coordinator_pb2
from tests.fl_server.admin_stack import admin_channel
from tests.fl_server.devices import NO_CONTEXT, Device
from tests.fl_server.harness import Journal, World, until

NAMES = ("a", "b", "c")


async def shown(world: World) -> dict[str, int]:
    """The counted updates that a list of clients shows."""
    async with admin_channel(world) as channel:
        listed = await admin_pb2_grpc.AdminStub(channel).ListClients(pb.ListClientsRequest())
    return {client.client_id: client.updates_counted for client in listed.clients}


def in_lists(world: World, exchange: int) -> dict[str, int]:
    """The updates of each client in the accepted lists of the committed rounds."""
    rounds = [commit.round for commit in world.store.commits("r")]
    accepted = [world.store.accepted("r", round_, exchange) for round_ in rounds]
    return dict(Counter(client for entries in accepted for client, _ in entries))


async def test_counted_updates_are_those_of_the_committed_lists(tmp_path: Path) -> None:
    """After rounds that were redrawn, a run that failed and was resumed, and a kill before a commit was entered."""
    devices = [Device(name) for name in NAMES]
    sections = {
        "algorithm": {"name": "mime"}, "round": {"clients_per_round": 3, "quorum": 1}, "stop": {"rounds": 4},
    }  # fmt: skip
    async with World(tmp_path, Journal()) as world:
        for device in devices:
            await device.connect(world)
        run = await world.create(**sections)
        await until(lambda: run.state.round >= 1 and run.state.phase is Phase.COLLECTING, "round 0 is committed")
        run.post(ev.StatesLost("the test redraws the round"))
        await until(lambda: run.state.attempt > 0 or run.state.round >= 2, "it is redrawn")
        run.fail("the test failed it")
        await until(lambda: run.ended and run.record.ended_at, "it failed")
        await run.wait_until_ended(8.0)
        await world.coordinator.actions.resume(run, "admin")
        world.journal.dies_at = "save"
        await until(lambda: world.journal.dead or run.ended, "it is killed between a checkpoint and its commit")
    async with World(tmp_path) as world:
        for device in devices:
            await device.connect(world)
        await world.completed()
        assert await shown(world) == in_lists(world, exchange=1)


async def test_replies_have_the_counted_updates(tmp_path: Path) -> None:
    """The status in the answer to a drain, a release, a ban and its end is the one of the list."""
    async with World(tmp_path) as world:
        for name in ("a", "b"):
            await Device(name).connect(world)
        await world.create(stop={"rounds": 2})
        await world.completed()
        async with admin_channel(world) as channel:
            stub = admin_pb2_grpc.AdminStub(channel)
            replies = [
                await stub.DrainClient(pb.DrainClientRequest(client_id="a", reason="repair")),
                await stub.ReleaseClient(pb.ReleaseClientRequest(client_id="a")),
                await stub.BanClient(pb.BanClientRequest(client_id="a", reason="smoke")),
                await stub.UnbanClient(pb.UnbanClientRequest(client_id="a")),
            ]
        assert [reply.client.updates_counted for reply in replies] == [2, 2, 2, 2]


async def test_a_client_was_last_seen_at_its_latest_sign_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Now while its stream is open, else at its latest call or at the loss of its stream. No call writes."""

    async def last_seen(world: World) -> float:
        async with admin_channel(world) as channel:
            listed = await admin_pb2_grpc.AdminStub(channel).ListClients(pb.ListClientsRequest())
        return float(listed.clients[0].last_seen.seconds)

    async with World(tmp_path, reattach_grace_s=600) as world:
        device = await Device("a").connect(world)
        monkeypatch.setattr(time, "time", lambda: 2_000_000_000.0)
        assert await last_seen(world) == 2_000_000_000
        await device.leave()
        monkeypatch.setattr(time, "time", lambda: 2_000_000_500.0)
        assert await last_seen(world) == 2_000_000_000
        writes = len(world.journal.writes)
        await world.service.ReportStatus(coordinator_pb2.ReportStatusRequest(session_id=device.session), NO_CONTEXT)
        monkeypatch.setattr(time, "time", lambda: 2_000_000_900.0)
        assert await last_seen(world) == 2_000_000_500
        assert len(world.journal.writes) == writes
