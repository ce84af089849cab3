"""Owners of runs: who sees and who changes which, in every method of the Admin service that names or lists runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from fl_server.clients.client_records import Workers
from fl_server.errors import Forbidden, NoSuchRun
from fl_server.identity import ANYBODY, Identity, caller
from fl_server.rpc.access import HIDDEN
from fl_server.rpc.admin import AdminService
from fl_server.run_settings.spec import to_spec
from fl_server.store.records import RunRecord
from protos.fl.v1 import admin_pb2 as pb
from tests.fl_server.devices import Device
from tests.fl_server.harness import World, run_config

ALICE, BOB = Identity("operator", "alice"), Identity("operator", "bob")
EYES, ROOT = Identity("viewer", "vera"), Identity("admin", "root")
BOTH = Identity("operator", "bob", source="token", roles=frozenset({"viewer", "operator"}))
RUNS = {"nobodys": ANYBODY, "alices": ALICE, "bobs": BOB, "roots": ROOT}
"""Run -> its creator."""
SEEN = [
    (ALICE, ["nobodys", "alices"]),
    (BOB, ["nobodys", "bobs"]),
    (EYES, list(RUNS)),
    (BOTH, list(RUNS)),
    (ROOT, list(RUNS)),
    (ANYBODY, list(RUNS)),
]
CONTEXT: Any = None


@contextmanager
def calling_as(who: Identity) -> Iterator[None]:
    """The caller of the calls in the block."""
    token = caller.set(who)
    try:
        yield
    finally:
        caller.reset(token)


def spec(name: str, owner: str | None = None) -> pb.RunSpec:
    """A run that waits for clients that never come."""
    return to_spec(run_config(name, round={"clients_per_round": 9}, owner=owner))


async def create_runs(folder: Path) -> None:
    """Write a ledger with the runs of all creators."""
    async with World(folder) as world:
        admin = AdminService(world.services, world.coordinator)
        for name, creator in RUNS.items():
            with calling_as(creator):
                await admin.CreateRun(pb.CreateRunRequest(spec=spec(name)), CONTEXT)


@pytest.fixture(scope="module")
def created(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state directory of that coordinator. Each test has a copy."""
    folder = tmp_path_factory.mktemp("created")
    asyncio.run(create_runs(folder))
    return folder


@pytest.fixture
async def world(created: Path, tmp_path: Path) -> AsyncIterator[World]:
    """A coordinator with the runs of all creators, after a restart."""
    copytree(created, tmp_path, dirs_exist_ok=True)
    async with World(tmp_path) as world:
        yield world


@pytest.fixture
def admin(world: World) -> AdminService:
    """Its Admin service."""
    return AdminService(world.services, world.coordinator)


async def paged(call: Any, request: Any, field: str) -> list[list[Any]]:
    """The entries of all pages of one entry."""
    found, request.page_size = [], 1
    while True:
        page = await call(request, CONTEXT)
        found.append(list(getattr(page, field)))
        if not page.next_page_token:
            return found
        request.page_token = page.next_page_token


async def drained(stream: Any) -> None:
    """Read a stream of responses to its first message."""
    async for _ in stream:
        return


async def test_the_list_has_the_runs_that_the_caller_sees(admin: AdminService) -> None:
    """As a whole and page by page: full pages, each run once, and no page after the last."""
    for who, seen in SEEN:
        with calling_as(who):
            whole = await admin.ListRuns(pb.ListRunsRequest(), CONTEXT)
            pages = await paged(admin.ListRuns, pb.ListRunsRequest(), "runs")
        assert [run.run_id for run in whole.runs] == seen, who
        assert [[run.run_id for run in page] for page in pages] == [[each] for each in seen], who
        owners = {run.run_id: run.spec.owner for run in whole.runs}
        assert owners == {name: owners_name for name, owners_name in OWNERS.items() if name in seen}, who


OWNERS = {"nobodys": "", "alices": "alice", "bobs": "bob", "roots": "root"}
READS = ("GetRun", "ListRounds", "WatchRun", "ListEvaluations")
CHANGES = ("PauseRun", "ResumeRun", "ExtendRun", "StopRun", "DeleteRun", "ExportModel")


async def test_a_run_of_another_operator_does_not_exist(admin: AdminService) -> None:
    """The error is that of an id that never existed, and nothing changes."""
    for method, run_id in product([*READS, *CHANGES], ("alices", "never-existed")):
        answer = _call(admin, method, run_id)
        with calling_as(BOB), pytest.raises(NoSuchRun) as refused:
            await (drained(answer) if hasattr(answer, "__anext__") else answer)
        assert str(refused.value) == f"no run {run_id!r}; `fl run list` shows those there are", method
    run = await admin.GetRun(pb.GetRunRequest(run_id="alices"), CONTEXT)
    assert run.run.state == pb.RUN_STATE_WAITING


def _call(admin: AdminService, method: str, run_id: str) -> Any:
    return getattr(admin, method)(getattr(pb, f"{method}Request")(run_id=run_id), CONTEXT)


async def test_a_run_that_is_only_seen_is_not_changed(admin: AdminService) -> None:
    """A token with the roles viewer and operator sees all runs and changes its own."""
    for method in CHANGES:
        answer = _call(admin, method, "alices")
        with calling_as(BOTH), pytest.raises(Forbidden, match="needed: the owner of the run, alice, or the role admin"):
            await (drained(answer) if hasattr(answer, "__anext__") else answer)


@pytest.mark.parametrize(("who", "run_id"), [(BOB, "bobs"), (BOB, "nobodys"), (ROOT, "alices"), (ANYBODY, "alices")])
async def test_who_may_change_a_run(admin: AdminService, who: Identity, run_id: str) -> None:
    """Its owner, everybody if it has none, an admin, and every caller where there are no identities."""
    with calling_as(who):
        stopped = await admin.StopRun(pb.StopRunRequest(run_id=run_id), CONTEXT)
        deleted = await admin.DeleteRun(pb.DeleteRunRequest(run_id=run_id), CONTEXT)
    assert (stopped.run.state, deleted.finished) == (pb.RUN_STATE_STOPPED, True)


@pytest.mark.parametrize(
    ("who", "owner", "becomes"),
    [(BOB, None, "bob"), (BOB, "bob", "bob"), (ROOT, None, "root"), (ROOT, "bob", "bob"), (ANYBODY, "bob", "bob")],
)
async def test_the_owner_of_a_new_run(admin: AdminService, who: Identity, owner: str | None, becomes: str) -> None:
    """By default the creator; an admin may name another."""
    with calling_as(who):
        created = await admin.CreateRun(pb.CreateRunRequest(spec=spec("new", owner)), CONTEXT)
    assert created.run.spec.owner == becomes


async def test_an_operator_cannot_name_another_owner(admin: AdminService, world: World) -> None:
    """The message has what is allowed; no run is created."""
    with calling_as(BOB), pytest.raises(Forbidden, match="needed: owner = 'bob' or none, or the role admin"):
        await admin.CreateRun(pb.CreateRunRequest(spec=spec("gift", "alice")), CONTEXT)
    assert "gift" not in world.coordinator.table.loaded


async def test_the_history_of_other_runs_is_passed_over(admin: AdminService, world: World) -> None:
    """Without a subject, page by page, and for a run that is not seen: no row of it, and tokens stay right."""
    with calling_as(ALICE):
        await world.coordinator.audit.run_refused(str(ALICE), "secret-plan", "task", "why")
    for who, seen in SEEN:
        with calling_as(who):
            whole = await admin.ListHistory(pb.ListHistoryRequest(), CONTEXT)
            pages = await paged(admin.ListHistory, pb.ListHistoryRequest(), "entries")
            rows = await admin.ListHistory(pb.ListHistoryRequest(subject="alices"), CONTEXT)
        subjects = {entry.subject for entry in whole.entries}
        assert subjects == {*seen, *(["secret-plan"] if who is not BOB else [])}, who
        assert [entry for page in pages for entry in page] == list(whole.entries)
        assert all(len(page) == 1 for page in pages)
        assert bool(rows.entries) == ("alices" in seen)


async def test_nobody_owns_the_history_of_a_deleted_run(admin: AdminService) -> None:
    """It stays for viewers and admins."""
    with calling_as(BOB):
        await admin.StopRun(pb.StopRunRequest(run_id="bobs"), CONTEXT)
        await admin.DeleteRun(pb.DeleteRunRequest(run_id="bobs"), CONTEXT)
    for who, has in ((BOB, False), (ALICE, False), (EYES, True), (ROOT, True)):
        with calling_as(who):
            found = await admin.ListHistory(pb.ListHistoryRequest(subject="bobs"), CONTEXT)
        assert bool(found.entries) == has, who


async def test_a_run_that_is_not_loaded_keeps_its_owner(admin: AdminService, world: World) -> None:
    """Another operator neither sees nor deletes it, and does not learn why it is not loaded."""
    record = RunRecord("broken", {"owner": "alice", "task": {"name": "gone"}}, "waiting", "", 1.0)
    world.coordinator.table.not_loaded.add(record, "its task is gone")
    for who, seen in ((ALICE, True), (BOB, False), (EYES, True)):
        with calling_as(who):
            listed = [run.run_id for run in (await admin.ListRuns(pb.ListRunsRequest(), CONTEXT)).runs]
            pages = await paged(admin.ListRuns, pb.ListRunsRequest(), "runs")
        assert ("broken" in listed, ["broken"] in [[run.run_id for run in page] for page in pages]) == (seen, seen)
    for method in ("GetRun", "ListRounds", "PauseRun", "DeleteRun"):
        with calling_as(BOB), pytest.raises(NoSuchRun, match="no run 'broken'; `fl run list`"):
            await _call(admin, method, "broken")
    with calling_as(ALICE):
        assert (await admin.GetRun(pb.GetRunRequest(run_id="broken"), CONTEXT)).run.spec.owner == "alice"


async def test_a_client_does_not_show_the_run_of_another_operator(
    admin: AdminService, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody sees the client and that it works; only those who see the run read its id."""
    await Device("edge-1").connect(world)
    monkeypatch.setattr(Workers, "run_of", lambda _, client_id: "alices")
    for who, shown in ((ALICE, "alices"), (BOB, HIDDEN), (EYES, "alices")):
        with calling_as(who):
            (listed,) = (await admin.ListClients(pb.ListClientsRequest(), CONTEXT)).clients
            found = await admin.GetClient(pb.GetClientRequest(client_id="edge-1"), CONTEXT)
            drained = await admin.DrainClient(pb.DrainClientRequest(client_id="edge-1"), CONTEXT)
        assert {listed.run_id, found.client.run_id, drained.client.run_id} == {shown}
        assert ("alices" in found.work) == (shown == "alices")
        assert found.work
