"""`GetOverview` and the orders of `ListClients`: counts, searches, values of a metric, pages without gaps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any, cast

import grpc
import pytest

from fl_server.identity import Identity
from fl_server.rpc.admin import AdminService
from fl_server.store.records import QuarantineRecord
from protos.fl.v1 import admin_pb2 as pb
from protos.fl.v1 import admin_pb2_grpc
from tests.fl_server.admin_stack import admin_channel
from tests.fl_server.devices import Device
from tests.fl_server.harness import World
from tests.fl_server.rpc.test_lists import listed, refused
from tests.fl_server.rpc.test_owners import calling_as, spec
from tests.fl_server.store.records import a_client, a_quarantine_record, a_run, an_update
from tests.marks import slow_except

CLIENTS = [f"c-{number:02}" for number in range(12)]
CONTEXT: Any = None


async def fill(folder: Path) -> None:
    """Write a ledger with thirteen clients and a run of six rounds."""
    async with World(folder) as world:
        await Device("a").connect(world)
        await world.create(round={"clients_per_round": 1}, stop={"rounds": 6}, evaluation={"every": 2})
        await world.completed()
        clients = [
            a_client(
                name,
                labels={"site": f"Rome-{number % 2}"},
                updates_counted=number % 5,
                software=f"impetus 0.{number}",
            )
            for number, name in enumerate(CLIENTS)
        ]
        broken = a_client("c-10", banned=True, note="Fan broken", software="impetus 0.10")
        world.store.put_clients([*clients[:-2], broken, clients[-1]])
        world.store.put_quarantine_record(a_quarantine_record("c-03", until=2e10))
        for number, name in enumerate(CLIENTS):
            for round_ in range(number % 3):
                refused = an_update(name, admitted=False)
                world.store.record_update(replace(refused, run_id="r", round=100 + round_))


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state directory of that coordinator. Each test has a copy."""
    folder = tmp_path_factory.mktemp("filled")
    asyncio.run(fill(folder))
    return folder


@pytest.fixture
async def world(filled: Path, tmp_path: Path) -> AsyncIterator[World]:
    """A coordinator that starts with that ledger, and gets two runs that wait for one of its clients."""
    copytree(filled, tmp_path, dirs_exist_ok=True)
    async with World(tmp_path) as world:
        for name in ("x", "y"):
            await world.create(name=name, round={"clients_per_round": 9})
        yield world


@pytest.fixture
async def stub(world: World) -> AsyncIterator[Any]:
    """The Admin service on a real port."""
    async with admin_channel(world) as channel:
        yield admin_pb2_grpc.AdminStub(channel)


async def test_counts_and_runs(world: World, stub: Any) -> None:
    """The newest run first; the metric's newest values in order; the numbers of all clients and runs."""
    world.coordinator.table.not_loaded.add(a_run("broken", created_at=1.0), "unknown task")
    seen = await stub.GetOverview(pb.GetOverviewRequest(points=2))
    assert [run.run_id for run in seen.runs] == ["y", "x", "r", "broken"]
    assert dict(seen.runs_by_state) == {"running": 2, "completed": 1, "unspecified": 1}
    assert dict(seen.clients_by_state) == {
        "present": 0, "suspect": 1, "lost": 12, "banned": 1, "draining": 0, "quarantined": 1, "attention": 1,
    }  # fmt: skip
    done, status = seen.runs[2], (await stub.GetRun(pb.GetRunRequest(run_id="r", with_rounds=True)))
    measured = [(round_.round, round_.metrics["loss"]) for round_ in status.rounds if round_.metrics]
    assert len(measured) == 3
    assert [(point.round, point.value) for point in done.points] == measured[-2:]
    assert done.best == min(value for _, value in measured)
    assert (done.rounds_done, done.rounds_planned, done.algorithm, done.metric) == (6, 6, "fedcm", "loss")
    assert done.latest_commit == status.run.latest.committed
    assert seen.runs[3].reason == "not loaded: unknown task"
    assert seen.history_number == (await stub.ListHistory(pb.ListHistoryRequest(limit=1))).entries[0].number
    assert seen.version
    assert seen.now.ToNanoseconds() > done.created.ToNanoseconds()


async def test_a_watch_begins_with_the_rounds_that_were_missed(stub: Any) -> None:
    """They come from the ledger before the snapshot; without a first round there are none."""
    for first, missed in ((4, [4, 5]), (6, []), (None, [])):
        events = [event async for event in stub.WatchRun(pb.WatchRunRequest(run_id="r", first_round=first))]
        assert [event.event for event in events] == ["committed_before"] * len(missed) + ["snapshot"]
        assert [event.round.round for event in events[:-1]] == missed


async def test_pages_search_and_states(stub: Any) -> None:
    """Filters hold over all pages, and a token belongs to its filters."""
    paged = await listed(stub.GetOverview, pb.GetOverviewRequest(page_size=1), "runs")
    assert [[run.run_id for run in page] for page in paged] == [["y"], ["x"], ["r"]]
    open_ = await stub.GetOverview(pb.GetOverviewRequest(states=[pb.RUN_STATE_RUNNING], page_size=1))
    assert ([run.run_id for run in open_.runs], open_.runs_found) == (["y"], 2)
    again = pb.GetOverviewRequest(page_size=1, page_token=open_.next_page_token)
    await refused(stub.GetOverview, again)
    assert [run.run_id for run in (await stub.GetOverview(pb.GetOverviewRequest(search="FEDC"))).runs] == [
        "y", "x", "r",
    ]  # fmt: skip
    assert [run.run_id for run in (await stub.GetOverview(pb.GetOverviewRequest(search="X"))).runs] == ["x"]


OUT_OF_RANGE: list[tuple[Any, str]] = [
    (pb.GetOverviewRequest(points=101), "points"),
    (pb.GetOverviewRequest(search="x" * 257), "search"),
    (pb.GetOverviewRequest(states=[cast(Any, 99)]), "states"),
    (pb.ListClientsRequest(search="x" * 257), "search"),
    (pb.ListClientsRequest(marks=["tall"]), "marks"),
    (pb.ListClientsRequest(order=cast(Any, 99)), "order"),
    (pb.ListClientsRequest(older_than="new"), "older_than"),
]


async def test_values_out_of_range(stub: Any) -> None:
    """Each is refused by the field's name."""
    for request, field in OUT_OF_RANGE:
        call = stub.GetOverview if isinstance(request, pb.GetOverviewRequest) else stub.ListClients
        with pytest.raises(grpc.aio.AioRpcError, match=f"{field}: expected") as error:
            await call(request)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT, field


async def test_runs_of_others_are_not_counted(world: World) -> None:
    """Bob's overview has neither Alice's run nor its state."""
    admin = AdminService(world.services, world.coordinator)
    with calling_as(Identity("operator", "alice")):
        await admin.CreateRun(pb.CreateRunRequest(spec=spec("alices")), CONTEXT)
    with calling_as(Identity("operator", "bob")):
        seen = await admin.GetOverview(pb.GetOverviewRequest(), CONTEXT)
    assert [run.run_id for run in seen.runs] == ["y", "x", "r"]
    assert dict(seen.runs_by_state) == {"running": 2, "completed": 1}


async def ids(stub: Any, **request: Any) -> list[str]:
    """The clients of all pages of a request."""
    pages = await listed(stub.ListClients, pb.ListClientsRequest(page_size=5, **request), "clients")
    return [client.client_id for page in pages for client in page]


async def test_clients_found_by_text_and_marks(stub: Any) -> None:
    """In id, labels and note, in any case; and by what an operator must look at."""
    assert await ids(stub, search="C-1") == ["c-10", "c-11"]
    assert await ids(stub, search="site=rome-1") == [*CLIENTS[1:10:2], "c-11"]
    assert await ids(stub, search="fan BROKEN") == ["c-10"]
    assert await ids(stub, marks=["banned", "quarantined"]) == ["c-03", "c-10"]
    assert (await stub.ListClients(pb.ListClientsRequest(search="c-", page_size=2))).found == 12


@pytest.mark.parametrize(
    "order",
    slow_except(["UPDATES_COUNTED", "UPDATES_REFUSED", "STATE", "LAST_SEEN", "VERSION", "ID"], "STATE", "VERSION"),
)
async def test_clients_in_every_order(stub: Any, order: str) -> None:
    """All clients once, over pages, in both directions; of equal ones the smaller id first."""
    keys: dict[str, Callable[[pb.ClientStatus], int]] = {
        "UPDATES_COUNTED": lambda client: client.updates_counted,
        "UPDATES_REFUSED": lambda client: client.updates_refused,
        "STATE": lambda client: client.state,
        "LAST_SEEN": lambda client: client.last_seen.seconds,
        "VERSION": lambda client: int(client.software.removeprefix("impetus 0.") or 0),
        "ID": lambda client: 0,
    }
    every = [client for page in await listed(stub.ListClients, pb.ListClientsRequest(), "clients") for client in page]
    for descending in (False, True):
        sign = -1 if descending else 1
        wanted = sorted(every, key=lambda client: (sign * keys[order](client), client.client_id))
        if order == "ID" and descending:
            wanted.reverse()
        found = await ids(stub, order=f"CLIENT_ORDER_{order}", descending=descending)
        assert found == [client.client_id for client in wanted]


async def test_clients_with_older_software(stub: Any) -> None:
    """Numbers are compared: 0.9 is older than 0.10. A client without a version is older than any."""
    assert await ids(stub, older_than="0.10") == ["a", *CLIENTS[:10]]
    assert await ids(stub, older_than="0.0") == []


def test_values_of_runs_without_any(world: World) -> None:
    """A metric that was never measured has none, and a quarantine record of the ledger is no value."""
    assert world.store.newest_values({"r": "nothing", "unknown": "accuracy"}, 5) == {"r": [], "unknown": []}
    assert isinstance(world.store.quarantine_records()[0], QuarantineRecord)
