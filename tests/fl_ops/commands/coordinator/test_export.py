"""`fl export`: the model arrives whole and checked, or no file appears."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest

from protos.chunks import make_chunk
from protos.digests import digest_message, digest_of, digest_text
from protos.fl.v1 import admin_pb2
from tests.fl_ops.conftest import FakeAdmin, Fl

MODEL = bytes(range(256)) * 4
Part = admin_pb2.ExportModelResponse


def header(model: bytes = MODEL) -> Part:
    """What goes before the chunks of a model."""
    facts = admin_pb2.ExportHeader(size_bytes=len(model), digest=digest_message(digest_of(model)))
    facts.round.round = 12
    return Part(header=facts)


def chunk(offset: int, length: int = 512, model: bytes = MODEL) -> Part:
    """A piece of a model."""
    return Part(chunk=make_chunk(model, offset, length))


@pytest.fixture
def out(admin: FakeAdmin, tmp_path: Path) -> Path:
    """Where the file goes, in a folder of its own; the coordinator sends MODEL."""
    admin.responses["ExportModel"] = [header(), chunk(0), chunk(512)]
    (tmp_path / "models").mkdir()
    return tmp_path / "models" / "m.safetensors"


@pytest.mark.parametrize("which", ["latest", "best", "12"])
def test_export(admin: FakeAdmin, fl: Fl, out: Path, which: str) -> None:
    """The file has the model's bytes, and the output their round and digest."""
    facts = json.loads(fl("export", "digits-1", "--round", which, "--out", out, "--json").stdout)
    assert out.read_bytes() == MODEL
    assert (facts["digest"], facts["round"]["round"]) == (digest_text(digest_of(MODEL)), 12)
    assert admin.requests == [admin_pb2.ExportModelRequest(run_id="digits-1", round=which, model="committed")]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        pytest.param([], "header first", id="nothing"),
        pytest.param([chunk(0)], "header first", id="no-header"),
        pytest.param([header(), chunk(0)], "expected 1024 bytes, got 512", id="cut-short"),
        pytest.param([header(), chunk(512), chunk(0)], "chunk at offset 0, got offset 512", id="out-of-order"),
        pytest.param([header(), chunk(0), chunk(512), chunk(0)], "offset 1024", id="too-long"),
        pytest.param([header(bytes(1024)), chunk(0), chunk(512)], "expected the digest blake3:", id="other-bytes"),
        pytest.param([header(), chunk(0), Part(), chunk(512)], "empty chunk", id="empty-part"),
        pytest.param([Part(header=admin_pb2.ExportHeader(size_bytes=1)), chunk(0)], "algorithm", id="no-digest"),
    ],
)
def test_damage(admin: FakeAdmin, fl: Fl, out: Path, parts: list[Part], expected: str) -> None:
    """A stream that is not the header's model leaves nothing behind, not even a part."""
    admin.responses["ExportModel"] = parts
    result = fl("export", "digits-1", "--out", out)
    assert result.exit_code == 1
    assert expected in result.stderr
    assert list(out.parent.iterdir()) == []


def test_damaged_chunk(admin: FakeAdmin, fl: Fl, out: Path) -> None:
    """A chunk with a wrong checksum is found."""
    damaged = chunk(0)
    damaged.chunk.crc32c ^= 1
    admin.responses["ExportModel"] = [header(), damaged, chunk(512)]
    assert "crc32c" in fl("export", "digits-1", "--out", out).stderr
    assert not out.exists()


def test_no_overwriting(admin: FakeAdmin, fl: Fl, out: Path) -> None:
    """A file that is there stays, and the coordinator is not asked; --force replaces it."""
    out.write_text("precious")
    assert fl("export", "digits-1", "--out", out).exit_code == 2
    assert (out.read_text(), admin.requests) == ("precious", [])
    assert fl("export", "digits-1", "--out", out, "--force").exit_code == 0
    assert out.read_bytes() == MODEL


def test_failed_replacement_keeps_the_old_file(admin: FakeAdmin, fl: Fl, out: Path) -> None:
    """With --force too, a damaged stream leaves the older file as it was."""
    out.write_text("precious")
    admin.responses["ExportModel"] = [header(), chunk(0)]
    assert fl("export", "digits-1", "--out", out, "--force").exit_code == 1
    assert out.read_text() == "precious"


@pytest.mark.parametrize("which", ["newest", "-1", "1.5", "²"])
def test_wrong_round(admin: FakeAdmin, fl: Fl, out: Path, which: str) -> None:
    """A round that is none is refused here."""
    result = fl("export", "digits-1", "--round", which, "--out", out)
    assert result.exit_code == 2
    assert "expected latest, best or a round's number" in result.stderr
    assert admin.requests == []


def test_unknown_round(admin: FakeAdmin, fl: Fl, out: Path) -> None:
    """A round that the coordinator no longer keeps is "not found"."""
    admin.fail("ExportModel", grpc.StatusCode.NOT_FOUND, "round 3 is no longer kept")
    result = fl("export", "digits-1", "--round", "3", "--out", out)
    assert result.exit_code == 5
    assert "round 3 is no longer kept" in result.stderr


def test_missing_folder(fl: Fl, out: Path) -> None:
    """A folder that does not exist is named."""
    result = fl("export", "digits-1", "--out", out.parent / "nowhere" / "m.safetensors")
    assert result.exit_code == 2
    assert "there is no folder" in result.stderr
