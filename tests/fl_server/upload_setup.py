"""A run that waits for two updates, and a device whose uploads a test controls message by message."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import pytest

from fl_server.run.run import Run
from fl_server.store.records import UpdateRecord
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import Receipt, UpdateHeader
from tests.fl_server.devices import NO_CONTEXT, Device, stream, update_message, upload
from tests.fl_server.harness import World

TWO = {"round": {"clients_per_round": 2}, "stop": {"rounds": 1}}


class UploadSetup:
    """The run, its two devices, and the good update of device a."""

    def __init__(self, world: World, run: Run, a: Device, b: Device) -> None:
        self.world, self.run, self.a, self.b = world, run, a, b

    async def prepare(self) -> Self:
        """Compute the update of device a."""
        self.assignment = await self.a.assigned()
        self.header, self.data = await self.a.update(self.world, self.assignment)
        self.layout = self.run.model.engine.layout
        return self

    def changed(self, data: bytes | None = None, **header: Any) -> tuple[UpdateHeader, bytes]:
        """Header and bytes with changed fields; digest and size fit the bytes unless they are given."""
        return update_message(self.assignment, self.layout, self.data if data is None else data, **header)

    async def send(
        self,
        header: UpdateHeader | None = None,
        data: bytes | None = None,
        start: int = 0,
        device: Device | None = None,
    ) -> Receipt:
        """Upload an update; the coordinator's receipt."""
        content = self.data if data is None else data
        return await self.submit(*upload(header or self.header, content, (device or self.a).session, start))

    async def submit(self, *parts: pb.SubmitUpdateRequest, hangs: bool = False) -> Receipt:
        """Call SubmitUpdate with these messages; the coordinator's receipt."""
        response = await self.world.service.SubmitUpdate(stream(*parts, hangs=hangs), NO_CONTEXT)
        return response.receipt

    async def kept(self, header: UpdateHeader | None = None) -> int:
        """The offset at which an upload would resume."""
        header = header or self.header
        query = pb.QueryUploadRequest(session_id=self.a.session, key=header.key, digest=header.digest)
        return (await self.world.service.QueryUpload(query, NO_CONTEXT)).kept_bytes

    def parts(self, **start: int) -> list[pb.SubmitUpdateRequest]:
        """The messages of a good upload."""
        return list(upload(self.header, self.data, self.a.session, **start))

    def files(self) -> list[str]:
        """Names of the files in the spool."""
        return sorted(path.name for path in (self.world.config.state_dir / "spool").rglob("*") if path.is_file())

    def line(self) -> UpdateRecord | None:
        """The ledger's row of device a's update."""
        found: UpdateRecord | None = self.world.store.update_of("r", 0, 0, "a")
        return found

    def recorded(self) -> UpdateRecord:
        """The same row. Fails if there is none."""
        found = self.line()
        assert found is not None
        return found


@asynccontextmanager
async def upload_setup(folder: Path, **limits: Any) -> AsyncIterator[UploadSetup]:
    """Two devices that were drawn for round 0."""
    async with World(folder, **limits) as world:
        a, b = [await Device(name, works=False).connect(world) for name in "ab"]
        yield await UploadSetup(world, await world.create(**TWO), a, b).prepare()


def block_method(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> tuple[threading.Event, threading.Event]:
    """Make a method block. Returns two events: the method was called; the test lets it go on."""
    begun, go_on, function = threading.Event(), threading.Event(), getattr(owner, name)

    def wait(*args: Any, **kwargs: Any) -> Any:
        begun.set()
        assert go_on.wait(120)
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, wait)
    return begun, go_on
