"""The list of what needs attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from fl_web.views.federation import FEDERATION
from fl_web.views.view import Params
from protos.fl.v1 import admin_pb2 as pb


class Readings:
    """A coordinator with one run."""

    def __init__(self, run: pb.RunOverview) -> None:
        self._run = run

    async def overview(self, wanted: Any) -> pb.GetOverviewResponse:
        """The run, where runs of its state are wanted."""
        runs = [self._run] if self._run.state in wanted.states else []
        return pb.GetOverviewResponse(runs=runs, clients_by_state={"present": 3})

    async def clients(self, _: Any) -> pb.ListClientsResponse:
        """No client."""
        return pb.ListClientsResponse()

    async def entries(self, **_: Any) -> Any:
        """No history."""
        return SimpleNamespace(entries=[])


async def test_clients_whose_labels_are_suspected_need_attention() -> None:
    """The line leads to the run, whose history names them."""
    run = pb.RunOverview(run_id="wards", state=pb.RUN_STATE_RUNNING, labels_suspected=2)
    shown = await FEDERATION.context(cast(Any, Readings(run)), Params({}))
    assert shown["problems"] == [("warn", "wards: check the order of the labels of 2 clients", "/runs/wards")]
    run.labels_suspected = 0
    assert (await FEDERATION.context(cast(Any, Readings(run)), Params({})))["problems"] == []


async def test_clients_below_their_due_need_attention() -> None:
    """The line leads to the run, which names them."""
    run = pb.RunOverview(run_id="wards", state=pb.RUN_STATE_RUNNING, below_due=3)
    shown = await FEDERATION.context(cast(Any, Readings(run)), Params({}))
    line = "wards: 3 clients count less than half of their due"
    assert shown["problems"] == [("warn", line, "/runs/wards")]
