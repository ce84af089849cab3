"""The contract and the code made from it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

ROOT = Path(__file__).parents[2]
PROTOS = sorted((ROOT / "protos/fl/v1").glob("*.proto"))

FILE_MESSAGES, FILE_SERVICES = 4, 6  # field numbers in FileDescriptorProto
MESSAGE_FIELDS = 2  # field number in DescriptorProto
SERVICE_METHODS = 2  # field number in ServiceDescriptorProto


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[FileDescriptorProto]:
    """Our .proto files as descriptors, comments included."""
    out = tmp_path_factory.mktemp("descriptors") / "set.binpb"
    names = [str(path.relative_to(ROOT)) for path in PROTOS]
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        "-I",
        ".",
        "--include_source_info",
        f"--descriptor_set_out={out}",
    ]
    subprocess.run([*command, *names], cwd=ROOT, check=True)
    return list(FileDescriptorSet.FromString(out.read_bytes()).file)


def commented_paths(file: FileDescriptorProto) -> set[tuple[int, ...]]:
    """Paths (see SourceCodeInfo) of all declarations that have a comment."""
    locations = file.source_code_info.location
    return {tuple(at.path) for at in locations if at.leading_comments.strip() or at.trailing_comments.strip()}


def declarations(file: FileDescriptorProto) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, path) of every field of every message, every service and every rpc."""
    for m, message in enumerate(file.message_type):
        for f, field in enumerate(message.field):
            yield f"{message.name}.{field.name}", (FILE_MESSAGES, m, MESSAGE_FIELDS, f)
    for s, service in enumerate(file.service):
        yield service.name, (FILE_SERVICES, s)
        for r, rpc in enumerate(service.method):
            yield f"{service.name}.{rpc.name}", (FILE_SERVICES, s, SERVICE_METHODS, r)


def test_generated_code_matches_the_contract(tmp_path: Path) -> None:
    """generate.sh writes the committed files byte for byte: they were neither edited nor forgotten."""
    subprocess.run([ROOT / "protos/generate.sh", tmp_path], check=True, env={**os.environ, "PYTHON": sys.executable})
    made = {path.name: path.read_bytes() for path in (tmp_path / "protos/fl/v1").iterdir()}
    committed = {path.name: path.read_bytes() for path in (ROOT / "protos/fl/v1").glob("*_pb2*.py*")}
    assert sorted(made) == sorted(committed)
    assert [name for name in made if made[name] != committed[name]] == []


def test_every_field_and_rpc_has_a_comment(files: list[FileDescriptorProto]) -> None:
    """The comments define the contract: unit, sender, meaning of an empty value."""
    bare = [name for file in files for name, path in declarations(file) if path not in commented_paths(file)]
    assert bare == []


def test_every_rpc_has_its_own_request_and_response(files: list[FileDescriptorProto]) -> None:
    """A field that one call needs can be added without another call getting it."""
    rpcs = [rpc for file in files for service in file.service for rpc in service.method]
    assert {rpc.name: (rpc.input_type, rpc.output_type) for rpc in rpcs} == {
        rpc.name: (f".fl.v1.{rpc.name}Request", f".fl.v1.{rpc.name}Response") for rpc in rpcs
    }


def test_every_enum_starts_unspecified(files: list[FileDescriptorProto]) -> None:
    """Number 0 is what an absent or newer value reads as: it must never mean anything."""
    enums = [enum for file in files for enum in file.enum_type]
    assert enums
    assert [enum.name for enum in enums if not enum.value[0].name.endswith("_UNSPECIFIED")] == []
