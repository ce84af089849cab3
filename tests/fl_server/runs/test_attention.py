"""Which clients need attention, with the same numbers after a restart."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from fl_server.runs.attention import OF_CLIENTS, Subject
from fl_server.settings.config import NEWEST_WORK, AttentionConfig
from fl_server.store.client_work import NEWEST, ClientWork, EndedWork, Timing
from fl_server.store.records import QuarantineRecord
from protos.fl.v1 import admin_pb2 as pb
from protos.fl.v1 import admin_pb2_grpc
from protos.fl.v1.training_pb2 import Assignment
from tests.fl_server.admin_stack import admin_channel
from tests.fl_server.devices import Device
from tests.fl_server.harness import World, until
from tests.fl_server.run.test_failures import PLACE, Broken

FAILED = EndedWork("r", 3, "KeyError", "KeyError: 'age'", 9.0)


def reasons(work: ClientWork, *, attached: bool = True, contested: bool = False, **limits: float) -> list[str]:
    """The reasons that hold for a client with this work. limits: settings of [attention]."""
    subject = Subject(work, attached, None, contested, AttentionConfig.model_validate(limits))
    return [rule.reason for rule in OF_CLIENTS if rule.why(subject)]


def slow(rounds: int, slowness: float, last: int) -> ClientWork:
    """A client that came last in so many rounds."""
    work = ClientWork()
    for number in range(rounds):
        work = work.in_round(1, Timing(4.0, 1.0, number < last, slowness))
    return work


def test_a_client_that_fails_often_needs_attention_and_one_that_failed_once_does_not() -> None:
    """Three of the newest assignments and a fifth of them; good work ends it."""
    work = ClientWork()
    for number in range(3):
        assert reasons(work) == [], f"{number} failures"
        work = work.ended("failed", FAILED)
    assert reasons(work) == ["failing"]
    assert reasons(work, attached=False) == []
    for _ in range(13):
        work = work.in_round(1, None)
    assert reasons(work) == []
    assert reasons(work, contested=True) == ["contested"]


def test_a_slow_client_is_last_often_and_takes_much_longer() -> None:
    """Both: one of two clients is always the last one."""
    assert reasons(slow(10, 3.0, last=6)) == ["slow"]
    assert reasons(slow(10, 1.5, last=10)) == []
    assert reasons(slow(10, 3.0, last=4)) == []
    assert reasons(slow(4, 9.0, last=4)) == []


def test_the_limits_are_settings() -> None:
    """0 turns a rule off; no limit is above what the ledger keeps."""
    assert NEWEST_WORK == NEWEST
    failed = ClientWork().ended("failed", FAILED)
    assert reasons(failed, assignments=1, share=1.0) == ["failing"]
    assert reasons(failed.in_round(1, None), assignments=1, share=1.0) == []
    assert reasons(failed, assignments=0) == []
    assert reasons(slow(3, 1.6, last=3), rounds=3, slowness=1.5) == ["slow"]
    assert reasons(slow(3, 1.6, last=2), rounds=3, slowness=1.5, last_share=1.0) == []
    assert reasons(slow(20, 9.0, last=20), rounds=0) == []


def test_a_quarantine_is_told_with_its_cause() -> None:
    """Also of a client that is away."""
    subject = Subject(
        ClientWork(), False, QuarantineRecord("a", 3, 2e9, "3 updates refused in a row"), False, AttentionConfig()
    )
    why = next(rule.why(subject) for rule in OF_CLIENTS if rule.reason == "quarantined")
    assert why == "in quarantine until 2033-05-18 03:33:20 UTC: 3 updates refused in a row"


class Uncertain(Broken):
    """A device that fails in the first rounds."""

    async def contribute(self, world: World, assignment: Assignment) -> None:
        """Fail, then work."""
        await (Broken if assignment.key.round < 3 else Device).contribute(self, world, assignment)


async def views(world: World) -> dict[str, Any]:
    """What operators see of clients."""
    async with admin_channel(world) as channel:
        stub: Any = admin_pb2_grpc.AdminStub(channel)
        marked = await stub.ListClients(pb.ListClientsRequest(marks=["attention"]))
        by_failed = await stub.ListClients(pb.ListClientsRequest(order=pb.CLIENT_ORDER_FAILED_SHARE, descending=True))
        overview = await stub.GetOverview(pb.GetOverviewRequest())
        shown = await stub.GetClient(pb.GetClientRequest(client_id="b"))
    return {
        "marked": [client.client_id for client in marked.clients],
        "by_failed": [client.client_id for client in by_failed.clients],
        "works": {client.client_id: client.work for client in by_failed.clients},
        "number": overview.clients_by_state["attention"],
        "needs": [(need.client_id, need.attention.reason) for need in overview.attention],
        "shown": shown.client.attention,
        "metric": world.metric("fl_clients_need_attention"),
    }


async def test_a_failing_client_is_named_everywhere_also_after_a_restart(tmp_path: Path) -> None:
    """Two of three deliver at once; b fails in three rounds. List, overview, metric and details have the same."""
    async with World(tmp_path) as world:
        devices = [Device("a"), Uncertain("b"), Device("c")]
        await asyncio.gather(*(device.connect(world) for device in devices))
        await world.create(round={"clients_per_round": 3, "quorum": 2}, stop={"rounds": 5})
        await world.completed()
        await until(lambda: world.fleet.work.of("b").admitted, "the counts are read")
        before = await views(world)
    assert (before["marked"], before["needs"], before["number"], before["metric"]) == (["b"], [("b", "failing")], 1, 1)
    assert before["by_failed"] == ["b", "a", "c"]
    work = before["works"]["b"]
    assert (work.assignments, work.failed, work.admitted) == (5, 3, 2)
    assert (work.last_failure.round, work.last_failure.run_id) == (2, "r")
    assert PLACE in work.last_failure.cause
    assert before["works"]["a"].rounds == 5
    assert before["works"]["a"].HasField("work_s")
    need = before["shown"][0]
    assert need.why.startswith("failed 3 of its newest 5 assignments, the last in run r round 2: task_error")
    assert "`fl clients show b`" in need.remedy
    async with World(tmp_path) as world:
        assert await views(world) == before
        async with admin_channel(world) as channel:
            released = await admin_pb2_grpc.AdminStub(channel).ReleaseClient(pb.ReleaseClientRequest(client_id="b"))
        assert (released.client.work.failed, released.client.work.newest) == (3, {})
        await until(lambda: not world.coordinator.attention.all(), "nobody needs attention")
