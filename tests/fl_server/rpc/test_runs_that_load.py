"""Calls of clients that name a run which is not loaded yet: each is asked again later, and nothing is given up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor

from fl_server.errors import InvalidInput, NotNow
from fl_server.run_settings.config import RunConfig
from fl_server.runs import restoration
from fl_server.runs.creation import LoadedTask, RunLoading
from fl_server.runs.table import LOADING_WAIT_S, NOT_LOADED_WAIT_S
from protos.codec import digest_message
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import ExchangeKey, RefusalReason, StageMessage, UpdateHeader
from tests.fl_server.devices import NO_CONTEXT, Device, stream
from tests.fl_server.harness import World, until

KEY, DIGEST = ExchangeKey(run_id="r"), digest_message(bytes(32))
REQUESTS: dict[str, Callable[[str], Any]] = {
    "FetchModel": lambda session: pb.FetchModelRequest(session_id=session, digest=DIGEST, run_id="r"),
    "SubmitUpdate": lambda session: pb.SubmitUpdateRequest(
        header=UpdateHeader(session_id=session, key=KEY, digest=DIGEST)
    ),
    "QueryUpload": lambda session: pb.QueryUploadRequest(session_id=session, key=KEY, digest=DIGEST),
    "ReportStatus": lambda session: pb.ReportStatusRequest(session_id=session, failures=[pb.WorkFailure(key=KEY)]),
    "AnswerStage": lambda session: pb.AnswerStageRequest(session_id=session, answer=StageMessage(key=KEY)),
    "ReportEvaluation": lambda session: pb.ReportEvaluationRequest(
        session_id=session, key=KEY, num_examples=1, metrics={"loss": 1.0}
    ),
}
TWO = {"round": {"clients_per_round": 2}}


async def call(world: World, method: str, session: str) -> Any:
    """Call a method of the service about the run."""
    function, request = getattr(world.service, method), REQUESTS[method](session)
    if method == "FetchModel":
        return [part async for part in function(request, NO_CONTEXT)]
    return await function(stream(request) if method == "SubmitUpdate" else request, NO_CONTEXT)


def named(message: Descriptor, seen: tuple[str, ...] = ()) -> Iterator[str]:
    """The fields of a message, and of all within it, that name a run."""
    for field in message.fields:
        if field.name == "run_id":
            yield field.full_name
        elif field.message_type is not None and field.message_type.full_name not in seen:
            yield from named(field.message_type, (*seen, field.message_type.full_name))


def test_all_methods_that_name_a_run_are_here() -> None:
    """Register and Attend name runs, too: they say nothing of one that is not loaded, because nothing is decided."""
    methods = pb.DESCRIPTOR.services_by_name["Coordinator"].methods
    assert {method.name for method in methods if [*named(method.input_type)]} == {*REQUESTS, "Register", "Attend"}


@pytest.fixture
async def loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A restarted coordinator that serves while it loads its run, a device, and the event that lets the load go on."""
    async with World(tmp_path) as world:
        await world.create(**TWO)
    go_on, task = asyncio.Event(), RunLoading.task

    async def slow(loading: RunLoading, config: RunConfig) -> LoadedTask:
        await go_on.wait()
        return await task(loading, config)

    monkeypatch.setattr(RunLoading, "task", slow)
    monkeypatch.setattr(restoration, "in_its_own_process", lambda *_: True)
    async with World(tmp_path, restore_wait_s=0.0) as world:
        yield world, await Device("a", works=False).connect(world), go_on


@pytest.mark.parametrize("method", REQUESTS)
async def test_a_call_about_a_run_that_is_being_loaded_comes_again(loading: Any, method: str) -> None:
    """It gets the time to wait, and once the run is loaded the answer that it would have had before the restart."""
    world, device, go_on = loading
    expected = "run 'r' is not loaded yet: its code is being loaded; try again in 5 s"
    for _ in range(2):
        with pytest.raises(NotNow, match=expected) as no:
            await call(world, method, device.session)
        assert no.value.detail.wait.seconds == LOADING_WAIT_S
    go_on.set()
    await until(lambda: "r" in world.coordinator.table.loaded, "the run is loaded")
    try:
        await call(world, method, device.session)
    except NotNow:
        pytest.fail("the run is loaded")
    except Exception:  # noqa: BLE001 - nobody was asked for this work: that the run answers is what counts
        return


async def test_other_failures_of_the_same_call_count(loading: Any) -> None:
    """A report about a run that is being loaded holds up none about others."""
    world, device, go_on = loading
    done: list[str] = []
    failure: Callable[[str, pb.WorkFailure], Awaitable[None]] = world.service._reports._failure

    async def noted(client: str, one: pb.WorkFailure) -> None:
        await failure(client, one)
        done.append(one.key.run_id)

    world.service._reports._failure = noted
    go_on.set()
    await until(lambda: "r" in world.coordinator.table.loaded, "the run is loaded")
    other = await world.create(name="other", **TWO)
    loaded = world.coordinator.table.loaded.pop("r")
    world.coordinator.table.not_loaded.add(loaded.record, "slow", loading=True)
    both = [pb.WorkFailure(key=KEY), pb.WorkFailure(key=ExchangeKey(run_id=other.id))]
    with pytest.raises(NotNow):
        await world.service.ReportStatus(pb.ReportStatusRequest(session_id=device.session, failures=both), NO_CONTEXT)
    world.coordinator.table.loaded["r"] = loaded
    assert done == [other.id]


async def test_a_run_that_other_settings_may_load_keeps_its_clients_work(tmp_path: Path) -> None:
    """Its task is not listed here. Updates wait for a start that lists it; a failure is not reported without end."""
    async with World(tmp_path) as world:
        await world.create(**TWO)
    async with World(tmp_path, tasks=()) as world:
        device = await Device("a", works=False, task="digits", options={}).connect(world)
        for method in REQUESTS.keys() - {"ReportStatus"}:
            with pytest.raises(NotNow, match="is not loaded yet: task.name: expected a task") as no:
                await call(world, method, device.session)
            assert no.value.detail.wait.seconds == NOT_LOADED_WAIT_S
        with pytest.raises(InvalidInput, match=r"failures\[0\].key.run_id"):
            await call(world, "ReportStatus", device.session)


async def test_an_update_for_a_run_that_is_over_is_late(tmp_path: Path) -> None:
    """One that has ended, and cannot be loaded any more, and one that nobody knows: the client drops its work."""
    async with World(tmp_path) as world:
        run = await world.create(**TWO)
        await world.coordinator.actions.stop(run, "enough", "admin")
        await world.ended()
    async with World(tmp_path, tasks=()) as world:
        assert "r" in world.coordinator.table.not_loaded
        device = await Device("a", works=False, task="digits", options={}).connect(world)
        receipt = (await call(world, "SubmitUpdate", device.session)).receipt
        assert (receipt.reason, receipt.detail) == (RefusalReason.REFUSAL_REASON_LATE, "no such run")
