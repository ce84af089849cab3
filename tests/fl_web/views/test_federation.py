"""The list of what needs attention."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from fl_web.rendering import rendered
from fl_web.views.federation import FEDERATION
from fl_web.views.view import Params
from protos.fl.v1 import admin_pb2 as pb


class Readings:
    """A coordinator with one run, and clients that need attention."""

    def __init__(self, run: pb.RunOverview, needs: Sequence[pb.ClientInNeed] = ()) -> None:
        self._run, self._needs = run, needs

    async def overview(self, _: int, states: Sequence[pb.RunState]) -> pb.GetOverviewResponse:
        """The run, where runs of its state are wanted."""
        runs = [self._run] if self._run.state in states else []
        clients = {"present": 3, "attention": len(self._needs)}
        return pb.GetOverviewResponse(runs=runs, clients_by_state=clients, attention=self._needs)

    async def clients(self, _: Any) -> pb.ListClientsResponse:
        """No client."""
        return pb.ListClientsResponse()

    async def entries(self, **_: Any) -> Any:
        """No history."""
        return SimpleNamespace(entries=[])


async def test_a_client_in_need_is_named_once() -> None:
    """Clients with suspected labels, or below their due, are in the list of clients, by name, and in no other line."""
    run = pb.RunOverview(run_id="wards", state=pb.RUN_STATE_RUNNING, labels_suspected=1, below_due=1)
    needs = [
        pb.ClientInNeed(client_id=client, attention=pb.Attention(reason=reason, why=why, remedy="`fl clients show`"))
        for client, reason, why in (("kiel", "labels", "its accuracy stays low"), ("lyon", "below_due", "1 of 4.0"))
    ]
    shown = await FEDERATION.context(cast(Any, Readings(run, needs)), Params({}))
    assert (shown["problems"], shown["health"]) == ([], ("warn", "needs attention"))
    text = rendered("federation.html", {"view": "federation", "live": "", "who": None, "parts": {}, **shown})
    assert [text.count(f'href="/clients/{client}"') for client in ("kiel", "lyon")] == [1, 1]
    assert "its accuracy stays low" in text


async def test_a_list_names_the_class_of_a_task() -> None:
    """The narrow column has no place for the module, which is in the title."""
    run = pb.RunOverview(run_id="r", state=pb.RUN_STATE_COMPLETED, task="our.wards.tasks:Beds", algorithm="fedcm")
    shown = await FEDERATION.context(cast(Any, Readings(run)), Params({}))
    text = rendered("federation.html", {"view": "federation", "live": "", "who": None, "parts": {}, **shown})
    assert 'title="Task our.wards.tasks:Beds">fedcm · Beds</td>' in text
