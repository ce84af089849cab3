"""Rounds with fewer updates than they wanted are marked, with what their failures have in common."""

from __future__ import annotations

from pathlib import Path

from fl_server.rpc.views import run_status
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import Assignment
from tests.fl_server.devices import NO_CONTEXT, Device
from tests.fl_server.harness import World, until

FIVE = {"clients_per_round": 5}
WHY = "its labels are no integers"


class Unable(Device):
    """A device whose data cannot be trained on."""

    async def contribute(self, world: World, assignment: Assignment) -> None:
        """Report the failure."""
        failure = pb.WorkFailure(key=assignment.key, reason=pb.FAILURE_REASON_RESOURCES, message=WHY)
        request = pb.ReportStatusRequest(session_id=self.session, failures=[failure])
        await world.service.ReportStatus(request, NO_CONTEXT)


async def connect(world: World, broken: int) -> None:
    """Five devices, of which the last ones are broken."""
    for number, name in enumerate("abcde"):
        await (Unable(name) if number >= 5 - broken else Device(name)).connect(world)


async def test_a_round_with_failures_is_marked(tmp_path: Path) -> None:
    """In the run's reason, its statistics, the history and the metrics; a restart keeps it."""
    async with World(tmp_path) as world:
        await connect(world, broken=2)
        run = await world.create(round=FIVE, stop={"rounds": 2})
        await world.completed()
        status = run_status(run)
        assert [commit.accepted for commit in world.store.commits("r")] == [3, 3]
        assert (status.account.short, status.latest.account.short) == (2, 1)
        assert status.reason.startswith(
            "2 rounds are done; 2 of 2 rounds are short: round 1 has 3 of 5 updates: 2 failed"
        )
        assert f"2 of them: resources: {WHY}" in status.reason
        assert world.metric("fl_rounds_short_total", run="r") == 2
        lines = [entry.detail for entry in world.store.history("r") if entry.event == "round_committed"]
        assert all("has 3 of 5 updates: 2 failed" in line for line in lines)
    async with World(tmp_path) as world:
        assert run_status(world.coordinator.run("r")).reason == status.reason


async def test_one_short_round_is_told_in_the_singular(tmp_path: Path) -> None:
    """The sentence is on every surface."""
    async with World(tmp_path) as world:
        await connect(world, broken=2)
        run = await world.create(round=FIVE, stop={"rounds": 1})
        await world.completed()
        assert run_status(run).reason.startswith("1 round is done; 1 of 1 round is short: round 0 has 3 of 5 updates")


async def test_a_round_without_failures_is_not_marked(tmp_path: Path) -> None:
    """Also with Bernoulli sampling, where each cohort has another size."""
    async with World(tmp_path) as world:
        await connect(world, broken=0)
        run = await world.create(round={"sampling": "bernoulli", "rate": 0.5}, stop={"rounds": 3})
        await world.completed()
        assert (run_status(run).account.short, run_status(run).reason) == (0, "3 rounds are done")


async def test_one_of_five_is_no_round(tmp_path: Path) -> None:
    """Four devices have broken data: nothing is committed, and the run says why it waits."""
    async with World(tmp_path) as world:
        await connect(world, broken=4)
        run = await world.create(round=FIVE, stop={"rounds": 1})
        await until(lambda: run.status == "waiting", "it waits")
        assert WHY in run_status(run).reason
        assert run.rounds.committed == 0
