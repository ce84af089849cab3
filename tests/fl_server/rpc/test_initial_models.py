"""Runs that start from a given model: sent, of another run, or of a folder; and what is refused."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file, save

from fl_ops.admin.client import model_parts
from fl_server.errors import InvalidInput
from fl_server.identity import Identity, caller
from fl_server.rpc.access import OwnedRuns
from fl_server.rpc.models import InitialModels, ModelExports
from fl_server.run_settings.config import RunConfig
from fl_server.run_settings.spec import to_spec
from protos.digests import digest_message
from protos.fl.v1 import admin_pb2 as pb
from protos.fl.v1 import admin_pb2_grpc
from tests.fl_server.admin_stack import admin_channel
from tests.fl_server.harness import World, run_config

UNUSABLE = 'initial_model: expected one that you may use: "run:ID:ROUND"'


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """As `opened`."""
    async with opened(tmp_path) as world:
        yield world


@asynccontextmanager
async def opened(tmp_path: Path) -> AsyncIterator[World]:
    """A coordinator with the run "r" and a folder of models, which has one, a text, a folder, a pipe and a link."""
    models = tmp_path / "models"
    (models / "folder").mkdir(parents=True)
    (models / "text.safetensors").write_text("root:x:0:0")
    os.mkfifo(models / "pipe")
    (models / "link").symlink_to("/etc/passwd")
    async with World(tmp_path / "state", settings={"models_dir": models}) as world:
        await world.create()
        (models / "start.safetensors").write_bytes(start_of(world))
        yield world


def start_of(world: World, add: float = 1.0) -> bytes:
    """A safetensors file: the first model of the run "r" with each parameter changed."""
    path = world.config.state_dir / "checkpoints" / "run-r" / "round-initial" / "model.safetensors"
    return save({name: each + add if each.is_floating_point() else each for name, each in load_file(path).items()})


def spec_of(named: str, name: str = "second") -> pb.CreateRunRequest:
    """The request for a run that starts from a model."""
    config: RunConfig = run_config(name, initial_model=named)
    return pb.CreateRunRequest(spec=to_spec(config))


async def create(world: World, named: str) -> pb.RunStatus:
    """Create a run over the wire."""
    async with admin_channel(world) as channel:
        status: pb.RunStatus = (await admin_pb2_grpc.AdminStub(channel).CreateRun(spec_of(named))).run
        return status


async def upload(world: World, parts: Iterator[pb.UploadModelRequest]) -> str:
    """Send a model over the wire."""
    async with admin_channel(world) as channel:
        return str((await admin_pb2_grpc.AdminStub(channel).UploadModel(parts)).initial_model)


def parts_of(folder: Path, content: bytes) -> list[pb.UploadModelRequest]:
    """The messages that `fl` sends for a file."""
    path = folder / "sent"
    path.write_bytes(content)
    with path.open("rb") as file:
        return list(model_parts(file))


async def test_a_sent_model_is_the_first_model_of_a_run_and_is_kept(world: World, tmp_path: Path) -> None:
    """With its bits; the status has its digest; the copy goes with the run, and the sent file is its sender's."""
    content = start_of(world)
    named = await upload(world, iter(parts_of(tmp_path, content)))
    status = await create(world, named)
    assert status.spec.initial_model == f"blake3:{blake3(content).hexdigest()}"
    first, wanted = world.coordinator.run("second").model.snapshot, load_file(tmp_path / "sent")
    for name, tensor in {**first.parameters, **first.buffers}.items():
        assert torch.equal(tensor, wanted[name]), name
    kept = world.services.checkpoints.start("second")
    assert kept.read_bytes() == content
    await world.coordinator.actions.stop(world.coordinator.run("second"), "", "admin")
    await world.coordinator.deletions.delete("second", "", "admin")
    assert not kept.exists()


async def test_a_restart_needs_neither_the_sent_file_nor_the_folder(tmp_path: Path) -> None:
    """The run's own copy makes the same first model, also if its first checkpoint is lost."""
    async with opened(tmp_path) as world:
        await create(world, "file:start.safetensors")
        before = world.coordinator.run("second").model.broadcasts[0].values_digest
        (tmp_path / "models" / "start.safetensors").unlink()
        world.services.checkpoints.prune("second", set())
    async with World(world.config.state_dir) as again:
        assert again.coordinator.run("second").model.broadcasts[0].values_digest == before


async def test_a_run_starts_from_the_model_of_another(world: World) -> None:
    """`run:ID:latest`; the history names it."""
    await create(world, "run:r:latest")
    digests = {world.coordinator.run(name).model.broadcasts[0].values_digest for name in ("r", "second")}
    assert len(digests) == 1
    entries = world.store.history("second", 10)
    assert [each.detail for each in entries if each.event == "run_created"] == [
        "tests.processes.tiny_task:Tiny, fedcm, from run:r:latest"
    ]


async def test_runs_and_files_of_other_operators_are_not_there(world: World, tmp_path: Path) -> None:
    """An operator names neither another's run nor another's file; their owner and an admin name the run."""
    await world.create(name="hers", owner="alice")
    models = InitialModels(
        world.services, OwnedRuns(world.coordinator), ModelExports(world.services, world.coordinator)
    )
    alice, bob, admin = (Identity(*each) for each in (("operator", "alice"), ("operator", "bob"), ("admin", "root")))
    token = caller.set(alice)
    try:
        sent = await models.receive(_each(parts_of(tmp_path, start_of(world))))
        for who, named, allowed in (
            *((alice, "run:hers:latest", True), (bob, "run:hers:latest", False), (admin, "run:hers:latest", True)),
            *((alice, sent, True), (bob, sent, False), (admin, sent, False)),
        ):
            caller.set(who)
            if allowed:
                file = await models.opened(named)
                assert file is not None
                file.close()
            else:
                with pytest.raises(InvalidInput, match=UNUSABLE):
                    await models.opened(named)
    finally:
        caller.reset(token)


async def _each(parts: list[pb.UploadModelRequest]) -> AsyncIterator[pb.UploadModelRequest]:
    for part in parts:
        yield part


@pytest.mark.parametrize(
    "named",
    [
        *("/etc/passwd", "/etc/shadow", "/etc", "/nowhere", "start.safetensors", "../models/start.safetensors"),
        *("file:nowhere", "file:folder", "file:pipe", "file:link", "file:text.safetensors", "file:", "file:.."),
        *("file:../state/checkpoints/run-r/round-initial/model.safetensors", "file:/etc/passwd", "file:" + "x" * 300),
        *("run:nobody:latest", "run:r:99", "run:r:best:x", "run:../r:latest", "run:", "blake3:" + "0" * 64),
        *("upload:" + "0" * 64, "upload:../../x", "upload:00", "digest:x"),
    ],
)
async def test_what_cannot_be_used_has_one_error(world: World, named: str) -> None:
    """A missing, unreadable, foreign or wrong file has the same text, and nothing on the wire is a path."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await create(world, named)
    expected = (
        f'{UNUSABLE} with a run whose models you may export, "upload:DIGEST" with a file that you sent (fl run create'
        f' --initial-model FILE), or "file:NAME" with a file in the models_dir of server.toml, got {named[:100]!r}'
    )
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, expected)
    assert [run.id for run in world.coordinator.runs()] == ["r"]


def _cut(parts: list[pb.UploadModelRequest]) -> list[pb.UploadModelRequest]:
    return parts[:-1]


def _digest(parts: list[pb.UploadModelRequest]) -> list[pb.UploadModelRequest]:
    parts[0].header.digest.CopyFrom(digest_message(bytes(32)))
    return parts


def _size(parts: list[pb.UploadModelRequest]) -> list[pb.UploadModelRequest]:
    parts[0].header.size_bytes = 1 << 40
    return parts


def _headless(parts: list[pb.UploadModelRequest]) -> list[pb.UploadModelRequest]:
    return parts[1:]


def _damaged(parts: list[pb.UploadModelRequest]) -> list[pb.UploadModelRequest]:
    parts[1].chunk.crc32c ^= 1
    return parts


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_cut, "chunk: expected a file as its header describes it, got 0 of"),
        (_digest, "chunk: expected the digest 0000"),
        (_size, r"size_bytes: expected 1 to 2147483648 bytes \(limits.max_update_mib\)"),
        (_headless, "part: expected a header first, got chunk"),
        (_damaged, "expected crc32c"),
    ],
)
async def test_a_damaged_upload_leaves_nothing(world: World, tmp_path: Path, change: Any, message: str) -> None:
    """The error names what was expected; no file stays."""
    with pytest.raises(grpc.aio.AioRpcError, match=message):
        await upload(world, iter(change(parts_of(tmp_path, start_of(world)))))
    assert [path for path in (world.config.state_dir / "uploaded").rglob("*") if path.is_file()] == []


async def test_another_format_is_refused_when_it_has_come(world: World, tmp_path: Path) -> None:
    """A pickle is no safetensors file."""
    torch.save({"x": torch.zeros(3)}, tmp_path / "model.pt")
    with pytest.raises(grpc.aio.AioRpcError, match="expected a safetensors file, got another kind of file"):
        await upload(world, iter(parts_of(tmp_path, (tmp_path / "model.pt").read_bytes())))


async def test_few_sent_models_are_kept(tmp_path: Path) -> None:
    """Two of an operator: a third replaces the oldest. A start removes what is older than an hour, and what is cut."""
    async with opened(tmp_path) as world:
        named = [await upload(world, iter(parts_of(tmp_path, start_of(world, add)))) for add in (1.0, 2.0, 3.0)]
    folder = world.config.state_dir / "uploaded"
    files = list(folder.rglob("*.safetensors"))
    assert {f"upload:{path.stem}" for path in files} == set(named[1:])
    os.utime(files[0], (1, 1))
    (files[0].parent / ".part-x").touch()
    async with World(world.config.state_dir):
        assert [path for path in folder.rglob("*") if path.is_file()] == [files[1]]
