"""Releases for tests: signed bytes of a run, and devices that take them without a network."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from blake3 import blake3

from fl_common.released import PURPOSE, WEIGHTS, Description, digest_text
from fl_common.signatures import SigningKey, make_key
from fl_ops.admin.client import model_parts
from fl_server.rpc.admin import AdminService
from protos.chunks import read_chunk
from protos.codec import digest_message
from protos.fl.v1 import admin_pb2 as pb
from protos.fl.v1 import coordinator_pb2
from tests.fl_server.devices import NO_CONTEXT, Device
from tests.fl_server.harness import TASK, World, until

MODEL = "tiny"


@cache
def signing_key() -> SigningKey:
    """A key of this process."""
    return make_key(Path(mkdtemp()) / "release.pem")


def description(data: bytes, **changes: Any) -> Description:
    """The description of a release with one file."""
    digest = blake3(data).hexdigest()
    files = [{"name": WEIGHTS, "size": len(data), "digest": digest}]
    values = {
        "model": MODEL, "version": 1, "run": "r", "round": 0, "task": TASK, "form": "whole", "files": files,
        "size": len(data), "digest": digest,
    }  # fmt: skip
    return Description.model_validate({**values, **changes})


async def release(
    world: World, folder: Path, version: int = 1, rules: pb.ReleaseRules | None = None, **changes: Any
) -> pb.ReleaseStatus:
    """Release bytes of a version, as `fl release` does."""
    data = bytes(f"version {version} ", "ascii") * 20_000
    (folder / "bundle").write_bytes(data)
    said = description(data, version=version, **changes).to_bytes()
    admin, key = AdminService(world.services, world.coordinator), signing_key()
    with (folder / "bundle").open("rb") as file:
        parts = list(model_parts(file, release=True))

    async def requests() -> Any:
        for part in parts:
            yield part

    await admin.UploadModel(requests(), NO_CONTEXT)
    request = pb.CreateReleaseRequest(
        description=said,
        signature=key.sign(PURPOSE, digest_text(said)),
        signer=key.signer,
        rules=rules or pb.ReleaseRules(stages=[1.0], most_failed=0.1),
    )
    return (await admin.CreateRelease(request, NO_CONTEXT)).release


@dataclass
class Receiver(Device):
    """A device that takes releases. The test answers for it."""

    works: bool = False
    held: dict[str, int] = field(default_factory=dict)

    def registration(self, **changes: Any) -> coordinator_pb2.RegisterRequest:
        """With the models that it has."""
        held = [coordinator_pb2.HeldRelease(model=model, version=version) for model, version in self.held.items()]
        return super().registration(releases=coordinator_pb2.HeldReleases(held=held), **changes)

    def orders(self) -> list[int]:
        """The versions that it was told to use, in order."""
        return [order.version for order in self.pushed("release")]

    async def told(self, version: int) -> coordinator_pb2.ReleaseOrder:
        """The latest order, once it is for this version."""

        def latest() -> coordinator_pb2.ReleaseOrder | None:
            orders: list[coordinator_pb2.ReleaseOrder] = self.pushed("release")
            return orders[-1] if orders and orders[-1].version == version else None

        return await until(latest, f"{self.name} is told to use version {version}")

    async def fetched(self, world: World, digest: str) -> bytes:
        """The bytes with a digest, by FetchModel."""
        named = digest_message(bytes.fromhex(digest))
        request = coordinator_pb2.FetchModelRequest(session_id=self.session, digest=named)
        data = b""
        async for message in world.service.FetchModel(request, NO_CONTEXT):
            if (chunk := read_chunk(message)) is not None:
                data += bytes(chunk.data)
        return data

    async def tells(self, world: World, version: int, outcome: str = "EVALUATED", **values: Any) -> None:
        """Report what became of a version."""
        if outcome == "EVALUATED":
            values = {"num_examples": 10, "metrics": {"accuracy": 0.9}, **values}
        request = coordinator_pb2.ReportReleaseRequest(
            session_id=self.session, model=MODEL, version=version, outcome=f"RELEASE_OUTCOME_{outcome}", **values
        )
        await world.service.ReportRelease(request, NO_CONTEXT)
        if outcome not in {"REFUSED", "FAILED"}:
            self.held[MODEL] = version
