"""Lists with pages: every entry once, in order, while entries come and go; bounds; tokens that are not valid."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from shutil import copytree
from typing import Any

import grpc
import pytest

from fl_server import pages
from fl_server.store.records import ClientEvaluation, CommitRecord
from protos.fl.v1 import admin_pb2 as pb
from protos.fl.v1 import admin_pb2_grpc
from protos.wire import MAX_MESSAGE_BYTES
from tests.fl_server.admin_stack import admin_channel
from tests.fl_server.devices import Device
from tests.fl_server.harness import World
from tests.fl_server.store.records import a_client, a_run, why

CLIENTS = [f"c-{number:03}" for number in range(25)]


async def fill(folder: Path) -> None:
    """Write a ledger with 25 clients and a run of 25 rounds, the last of which 25 clients evaluated."""
    async with World(folder) as world:
        await Device("a").connect(world)
        await world.create(
            round={"clients_per_round": 1}, stop={"rounds": 25}, evaluation={"every": 0, "clients_every": 25}
        )
        await world.completed()
        world.store.put_clients(
            [a_client(client, labels={"half": str(number % 2)}) for number, client in enumerate(CLIENTS)]
        )
        for client in CLIENTS:
            world.store.record_evaluation(ClientEvaluation("r", 24, client, 3, {"accuracy": 0.5}, 30.0))


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state directory of that coordinator. Each test has a copy."""
    folder = tmp_path_factory.mktemp("filled")
    asyncio.run(fill(folder))
    return folder


@pytest.fixture
async def world(filled: Path, tmp_path: Path) -> AsyncIterator[World]:
    """A coordinator that starts with that ledger."""
    copytree(filled, tmp_path, dirs_exist_ok=True)
    async with World(tmp_path) as world:
        yield world


@pytest.fixture
async def stub(world: World) -> AsyncIterator[Any]:
    """The Admin service on a real port."""
    async with admin_channel(world) as channel:
        yield admin_pb2_grpc.AdminStub(channel)


async def listed(call: Any, request: Any, field: str) -> list[list[Any]]:
    """The entries of all pages."""
    found = []
    while True:
        page = await call(request)
        found.append(list(getattr(page, field)))
        if not page.next_page_token:
            return found
        request.page_token = page.next_page_token


async def test_each_list_has_pages(world: World, stub: Any) -> None:
    """The pages together are the whole list, in its order."""
    clients = await listed(stub.ListClients, pb.ListClientsRequest(page_size=10), "clients")
    assert [len(page) for page in clients] == [10, 10, 6]
    assert [client.client_id for page in clients for client in page] == ["a", *CLIENTS]
    rounds = await listed(stub.ListRounds, pb.ListRoundsRequest(run_id="r", page_size=10), "rounds")
    assert [each.round for page in rounds for each in page] == list(range(25))
    assert [len(page) for page in rounds] == [10, 10, 5]
    whole = await stub.GetRun(pb.GetRunRequest(run_id="r", with_rounds=True))
    assert [each for page in rounds for each in page] == list(whole.rounds)
    late = await listed(stub.ListRounds, pb.ListRoundsRequest(run_id="r", page_size=2, first_round=22), "rounds")
    assert [each.round for page in late for each in page] == [22, 23, 24]
    history = await listed(stub.ListHistory, pb.ListHistoryRequest(subject="r", limit=30, page_size=7), "entries")
    entries = await stub.ListHistory(pb.ListHistoryRequest(subject="r", limit=30))
    assert [entry for page in history for entry in page] == list(entries.entries)
    assert [len(page) for page in history] == [7, 7, 7, 7, 2]
    for name in ("x", "y"):
        await world.create(name=name, round={"clients_per_round": 9})
    runs = await listed(stub.ListRuns, pb.ListRunsRequest(page_size=1), "runs")
    assert [[run.run_id for run in page] for page in runs] == [["r"], ["x"], ["y"]]
    answers = await listed(stub.ListEvaluations, pb.ListEvaluationsRequest(run_id="r", page_size=10), "evaluations")
    assert [len(page) for page in answers] == [10, 10, 5]
    assert [answer.client_id for page in answers for answer in page] == CLIENTS


async def test_entries_that_come_and_go_move_no_other(world: World, stub: Any) -> None:
    """Between two pages one listed client is forgotten and one registers before the page: none is skipped or twice."""
    first = await stub.ListClients(pb.ListClientsRequest(page_size=10))
    world.fleet.records.forget(first.clients[5].client_id)
    await world.fleet.records.write(a_client("b"), None)
    rest = pb.ListClientsRequest(page_size=10, page_token=first.next_page_token)
    found = [client.client_id for page in await listed(stub.ListClients, rest, "clients") for client in page]
    assert found == CLIENTS[9:]
    history = await stub.ListHistory(pb.ListHistoryRequest(page_size=10))
    world.store.add_history(why("later"))
    later = pb.ListHistoryRequest(page_size=10, page_token=history.next_page_token)
    events = [entry.event for page in await listed(stub.ListHistory, later, "entries") for entry in page]
    assert "later" not in events


async def test_clients_by_state_and_label(stub: Any) -> None:
    """Filters hold over all pages, and a token belongs to its filters."""
    half = pb.ListClientsRequest(page_size=5, labels={"half": "1"})
    assert [client.client_id for page in await listed(stub.ListClients, half, "clients") for client in page] == CLIENTS[
        1::2
    ]
    # After the restart, the coordinator waits for the client that was present.
    suspect = pb.ListClientsRequest(page_size=5, state=pb.CLIENT_STATE_SUSPECT)
    assert [client.client_id for page in await listed(stub.ListClients, suspect, "clients") for client in page] == ["a"]
    token = (await stub.ListClients(pb.ListClientsRequest(page_size=5, labels={"half": "0"}))).next_page_token
    await refused(stub.ListClients, pb.ListClientsRequest(page_size=5, labels={"half": "1"}, page_token=token))


async def refused(
    call: Any, request: Any, text: str = "page_token: expected the next_page_token of a reply to"
) -> None:
    """The call is INVALID_ARGUMENT with this text."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call(request)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert text in str(error.value.details())


async def test_a_token_that_is_not_valid(stub: Any) -> None:
    """It is refused in one line by every list, and so is a token of another list."""
    other = (await stub.ListRounds(pb.ListRoundsRequest(run_id="r", page_size=1))).next_page_token
    for each in ("x", "====", "W10=", "WzEsWzFdXQ==", "a" * 60_000, "\N{SNOWMAN}", "bnVsbA==", other):
        await refused(stub.ListClients, pb.ListClientsRequest(page_token=each))
        await refused(stub.ListRuns, pb.ListRunsRequest(page_token=each))
        await refused(stub.ListHistory, pb.ListHistoryRequest(page_token=each))
        await refused(stub.ListEvaluations, pb.ListEvaluationsRequest(run_id="r", page_token=each))
        await refused(stub.ListRounds, pb.ListRoundsRequest(run_id="r", first_round=1, page_token=each))


@pytest.mark.slow
async def test_a_page_is_bounded_in_entries_and_bytes(world: World, stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of large entries is shorter, and one entry always fits."""
    world.store.create_run(a_run("long"), why())
    for round_ in range(1200):
        world.store.commit(CommitRecord("long", *commit_values(round_)), why())
    async with admin_channel(world) as channel:
        call = admin_pb2_grpc.AdminStub(channel).ListRounds
        world.coordinator.table.not_loaded.add(a_run("long"), "unknown task")
        found = await listed(call, pb.ListRoundsRequest(run_id="long", page_size=2**32 - 1), "rounds")
        assert [len(page) for page in found] == [1000, 200]
        monkeypatch.setattr(pages, "PAGE_BYTES", 1000)
        small = await listed(call, pb.ListRoundsRequest(run_id="long", page_size=500, first_round=1180), "rounds")
        assert [each.round for page in small for each in page] == list(range(1180, 1200))
        assert {sum(each.ByteSize() for each in page) <= 1000 for page in small} == {True}
        monkeypatch.setattr(pages, "PAGE_BYTES", 1)
        single = await listed(call, pb.ListRoundsRequest(run_id="long", page_size=500, first_round=1197), "rounds")
        assert [len(page) for page in single] == [1, 1, 1]


def commit_values(round_: int) -> tuple[Any, ...]:
    """The values of a commit after its run."""
    return (round_, 20.0, 3.0, 1, 2, 0, 0.5, 7, 7, "blake3:00")


async def test_a_call_without_a_page_size_gets_a_page(stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has as many entries as fit into a reply, and a token. GetRun has all rounds or an error with what to do."""
    assert len((await stub.ListClients(pb.ListClientsRequest())).clients) == 26
    monkeypatch.setattr(pages, "PAGE_BYTES", 300)
    first = await stub.ListClients(pb.ListClientsRequest())
    assert 0 < len(first.clients) < 26
    assert first.next_page_token
    whole = pb.GetRunRequest(run_id="r", with_rounds=True)
    await refused(
        stub.GetRun,
        whole,
        "with_rounds: expected a run of at most 1,000 rounds that fit into one reply; List",
    )
    assert not (await stub.GetRun(pb.GetRunRequest(run_id="r"))).rounds
    assert pages.PAGE_BYTES < MAX_MESSAGE_BYTES
