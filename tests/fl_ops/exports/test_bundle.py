"""The files of a release: what each form has, described and in one piece; and what a device measures with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from safetensors.torch import load

from fl_client.training.data import LocalTask
from fl_client.training.trainer import Trainer
from fl_common.released import WEIGHTS
from fl_ops.admin.client import model_parts
from fl_ops.exports.bundle import bundled
from fl_tasks import Shard, fingerprint
from fl_tasks.data.forms import as_data
from protos.fl.v1 import admin_pb2
from protos.fl.v1.training_pb2 import TaskFingerprint
from tests.fl_ops.exports.test_formats import exported
from tests.processes.backbone_task import Adapted, write_backbone

SHARD = Shard(torch.arange(64))
BASE: dict[str, object] = {
    "model": "adapted",
    "version": 1,
    "run": "r",
    "task": "adapted",
    "labels": {},
    "personal": [],
}


@pytest.fixture
def adapted(tmp_path: Path) -> Adapted:
    """A frozen matrix from a file, and trained adapters."""
    return Adapted(str(write_backbone(tmp_path / "backbone.safetensors", 12)), kept=16)


def parts(file: Path) -> Iterator[admin_pb2.ExportModelResponse]:
    """A file as ExportModel sends it."""
    with file.open("rb") as opened:
        for part in model_parts(opened):
            if part.HasField("header"):
                header = admin_pb2.ExportHeader(size_bytes=part.header.size_bytes, digest=part.header.digest)
                yield admin_pb2.ExportModelResponse(header=header)
            else:
                yield admin_pb2.ExportModelResponse(chunk=part.chunk)


@pytest.mark.parametrize(
    ("form", "names"),
    [
        ("whole", {WEIGHTS}),
        ("adapter", {WEIGHTS, "adapter_config.json", "adapter_model.safetensors"}),
        pytest.param("onnx", {WEIGHTS, "model.onnx"}, marks=pytest.mark.slow),
    ],
)
def test_a_device_measures_the_same_with_each_form(
    adapted: Adapted, tmp_path: Path, form: str, names: set[str]
) -> None:
    """The description has the digest of every file; without frozen parameters the device uses its own."""
    with bundled(parts(exported(adapted, tmp_path)), form, lambda: adapted) as bundle:
        described = bundle.described({**BASE, "form": form})
        bundle.file.seek(0)
        data = bundle.file.read()
    assert {file.name for file in described.files} == names
    assert (described.size, described.digest) == (len(data), blake3(data).hexdigest())
    for file in described.files:
        start, size = described.span(file.name)
        assert blake3(data[start : start + size]).hexdigest() == file.digest
    start, size = described.span(WEIGHTS)
    weights = tmp_path / WEIGHTS
    weights.write_bytes(data[start : start + size])
    assert ("backbone.weight" in load(weights.read_bytes())) is (form != "adapter")
    measured = _trainer(adapted).evaluate_file(_trainer(adapted).own_evaluation(), weights)
    assert measured.examples == 16
    assert measured.metrics == pytest.approx(_expected(adapted, tmp_path))


def _trainer(task: Adapted) -> Trainer:
    version, source = fingerprint(task)
    made = TaskFingerprint(version=version, source=source)
    data = as_data(task.train_data(SHARD))
    return Trainer(LocalTask("adapted", task, made, data, as_data(task.eval_data(SHARD))))


def _expected(task: Adapted, folder: Path) -> dict[str, float]:
    """The metrics of the model of the run that sends its frozen parameters, computed here."""
    model = task.model()
    model.load_state_dict(load(exported(task, folder / "sent", "send").read_bytes()), strict=True)
    held_out = task.eval_data(SHARD)
    with torch.no_grad():
        values = task.metrics(model(held_out.inputs), held_out.targets)
    return {name: float(value.double().mean()) for name, value in values.items()}
