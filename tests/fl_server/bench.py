"""A run that waits for two updates, and one device that a test makes send whatever it likes."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from protos.fl.v1 import coordinator_pb2 as pb
from tests.fl_server.devices import Device, announced, stream, upload
from tests.fl_server.harness import World

TWO = {"round": {"clients_per_round": 2}, "stop": {"rounds": 1}}


class Bench:
    """A run that waits for two updates, and what device a would send to it."""

    def __init__(self, world, run, a, b):
        self.world, self.run, self.a, self.b = world, run, a, b

    async def prepare(self):
        self.assignment = await self.a.assigned()
        self.header, self.data = await self.a.update(self.world, self.assignment)
        self.layout = self.run.model.engine.layout
        return self

    def changed(self, data=None, **header):
        """Header and bytes with something else in them; digest and size fit unless they are given."""
        return announced(self.assignment, self.layout, self.data if data is None else data, **header)

    async def send(self, header=None, data=None, start=0, device=None):
        """What the coordinator answers to an upload."""
        parts = upload(header or self.header, self.data if data is None else data, (device or self.a).session, start)
        return await self.submit(*parts)

    async def submit(self, *parts, hangs=False):
        answer = await self.world.service.SubmitUpdate(stream(*parts, hangs=hangs), None)
        return answer.receipt

    async def kept(self, header=None):
        """Where an upload would go on."""
        header = header or self.header
        query = pb.QueryUploadRequest(session_id=self.a.session, key=header.key, digest=header.digest)
        return (await self.world.service.QueryUpload(query, None)).kept_bytes

    def parts(self, **start):
        """The messages of a good upload."""
        return list(upload(self.header, self.data, self.a.session, **start))

    def files(self):
        """Names of what lies in the spool."""
        return sorted(path.name for path in (self.world.config.state_dir / "spool").rglob("*") if path.is_file())

    def line(self):
        """The ledger's line on device a."""
        return self.world.store.update_of("r", 0, 0, "a")


@asynccontextmanager
async def a_bench(folder: Path, **limits: float) -> AsyncIterator[Bench]:
    """Two devices that were drawn for round 0."""
    async with World(folder, **limits) as world:
        a, b = [await Device(name, works=False).come(world) for name in "ab"]
        yield await Bench(world, await world.create(**TWO), a, b).prepare()


def held(monkeypatch, owner, name):
    """Makes a method wait until the event it returns second is set; the first tells that it has begun."""
    begun, go_on, function = threading.Event(), threading.Event(), getattr(owner, name)

    def wait(*args, **kwargs):
        begun.set()
        assert go_on.wait(20)
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, wait)
    return begun, go_on
