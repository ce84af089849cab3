"""docs/development/architecture.md: how many of the coordinator's modules one update passes.

A module counts if one of its functions begins, in any thread, after the first message of an upload over a real port.
Imports and class bodies do not count.
A smaller number on the page makes the test fail with their list.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import grpc
import grpc.aio

from fl_server.rpc import service
from fl_server.rpc.call_limits import CallLimits
from fl_server.rpc.interceptors import CallInterceptor, CallPolicy
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import coordinator_pb2_grpc
from tests.docs.pages import read_page
from tests.fl_server.devices import Device, upload
from tests.fl_server.harness import TIMEOUT_S, World, until
from tests.fl_server.upload_setup import upload_setup

ROOT = Path(service.__file__).parents[2]


class PassedModules:
    """Modules of fl_server whose functions begin. Threads that began before `watched` do not count."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.on = False

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """One event of the profiler."""
        if self.on and event == "call" and frame.f_code.co_name != "<module>":
            self.files.add(frame.f_code.co_filename)

    @property
    def names(self) -> list[str]:
        """Their paths in the repository."""
        paths = (Path(file).resolve() for file in self.files)
        return sorted(str(path.relative_to(ROOT)) for path in paths if path.is_relative_to(ROOT / "fl_server"))


@contextmanager
def watched() -> Iterator[PassedModules]:
    """Watch all threads that begin in this block, and this one."""
    passed = PassedModules()
    threading.setprofile(passed)
    sys.setprofile(passed)
    try:
        yield passed
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


async def sent(world: World, messages: list[pb.SubmitUpdateRequest]) -> pb.SubmitUpdateResponse:
    """The answer to an upload over a real port, through the interceptors."""
    policy = CallPolicy(world.services.metrics, CallLimits(64, 1000), trusts_everybody=True)
    server = grpc.aio.server(interceptors=[CallInterceptor(policy)])
    server.add_generic_rpc_handlers((service.handlers(world.service),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def requests() -> AsyncIterator[pb.SubmitUpdateRequest]:
        for message in messages:
            yield message

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: Any = coordinator_pb2_grpc.CoordinatorStub(channel).SubmitUpdate(requests(), timeout=TIMEOUT_S)
        response: pb.SubmitUpdateResponse = await call
    await server.stop(None)
    return response


def stated() -> tuple[int, int]:
    """Modules up to the receipt, and up to the next round, as the page says."""
    found = re.search(r"at most (\d+) modules.*?, and (\d+) ", read_page("docs/development/architecture.md"))
    assert found is not None
    return int(found[1]), int(found[2])


async def test_an_update_passes_no_more_modules_than_the_page_says(tmp_path: Path) -> None:
    """Up to its receipt: the update is admitted and the core has it."""
    with watched() as passed:
        async with upload_setup(tmp_path) as setup:
            store = setup.world.store
            await until(lambda: store.runs()[0].state == "running", "its state is written")
            passed.on = True
            response = await sent(setup.world, setup.parts())
            await until(lambda: setup.run.state.admitted, "the run has the update")
            passed.on = False
    assert response.receipt.admitted
    assert "fl_server/rounds/collecting.py" in passed.names
    assert len(passed.names) <= stated()[0], "\n".join(passed.names)


async def test_the_last_update_of_a_round_passes_no_more_modules_than_the_page_says(tmp_path: Path) -> None:
    """Up to the assignment of the next round: also the step, the checkpoint and the commit."""
    with watched() as passed:
        async with World(tmp_path) as world:
            device = await Device("a", works=False).connect(world)
            await world.create(round={"clients_per_round": 1}, stop={"rounds": 2})
            header, data = await device.update(world, await device.assigned(0))
            passed.on = True
            await sent(world, list(upload(header, data, device.session)))
            await device.assigned(1)
            passed.on = False
    assert "fl_server/store/checkpoints.py" in passed.names
    assert len(passed.names) <= stated()[1], "\n".join(passed.names)
