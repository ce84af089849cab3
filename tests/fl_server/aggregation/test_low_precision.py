"""Runs with models of bfloat16 and float16: the server's float32 master, what is sent, and checkpoints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import algorithms as fl
from fl_server.aggregation.engine import Engine
from fl_server.aggregation.methods import round_info
from fl_server.aggregation.outgoing import make_broadcast
from fl_server.aggregation.server_update import Diverged
from fl_server.aggregation.snapshot import Snapshot
from fl_server.run_settings.spec import from_values
from fl_server.store.checkpoints import Checkpoints
from protos.codec import pack
from tests.fl_server.aggregation.test_engine import engine as tiny_engine
from tests.fl_server.aggregation.test_engine import same, same_snapshot, updates
from tests.marks import slow_except

LOW = [torch.bfloat16, torch.float16]
LAYER = "first.weight"


def engine(dtype: torch.dtype, start: float = 1.0, method: str = "fedavg", **sections: Any) -> Engine:
    """An engine for a model of one number of this dtype."""

    def model() -> nn.Module:
        layer = nn.Linear(1, 1, bias=False, dtype=dtype)
        nn.init.constant_(layer.weight, start)
        return layer

    task: Any = SimpleNamespace(model=model)
    return Engine(from_values({"task": {"name": "one"}, "algorithm": {"name": method}, **sections}), task)


def after(engine: Engine, snapshot: Snapshot, deltas: Sequence[float], folder: Path) -> Snapshot:
    """The snapshot after rounds of one client with these deltas."""
    for delta in deltas:
        path = folder / "update"
        path.write_bytes(pack({"weight": torch.tensor([[delta]], dtype=engine.layout.entries[0].dtype)}, engine.layout))
        snapshot, _ = engine.server_update(snapshot, [fl.UpdateInfo("a", 1, 1)], [path])
    return snapshot


@pytest.mark.parametrize("dtype", LOW)
def test_an_average_is_of_what_clients_get(tmp_path: Path, dtype: torch.dtype) -> None:
    """It is the float64 mean of the models that are exported, rounded once, and has their dtype."""
    tested = engine(dtype, averaging={"method": "tail", "start": 0})
    snapshot, sent = tested.first(), list[torch.Tensor]()
    for round_ in range(6):
        folder = tmp_path / str(round_)
        folder.mkdir()
        snapshot = after(tested, snapshot, [0.0009], tmp_path)
        assert snapshot.averaged is not None
        snapshot.averaged.write_sums(folder)
        snapshot = snapshot.averaged_in(folder)
        sent.append(snapshot.parameters["weight"])
    averaged = snapshot.of_average()
    assert averaged is not None
    total = sum((each.double() for each in sent), torch.zeros(1, 1, dtype=torch.float64))
    assert torch.equal(averaged.parameters["weight"], (total / 6).to(dtype))
    assert torch.stack(sent).float().ne(snapshot.state.x["weight"]).all()


@pytest.mark.parametrize("dtype", slow_except(LOW, LOW[0]))
@pytest.mark.parametrize("method", slow_except(["fedavg", "fedavgm", "fedadam"], "fedadam"))
def test_small_movements_add_up_as_in_float32(tmp_path: Path, method: str, dtype: torch.dtype) -> None:
    """Each of 200 movements is below half a step of the model's numbers. Clients get the nearest of these numbers."""
    delta = torch.tensor(0.0001, dtype=dtype).item()
    low, high = engine(dtype, method=method), engine(torch.float32, method=method)
    got, expected = (after(each, each.first(), [delta] * 200, tmp_path) for each in (low, high))
    same(got.state.x, expected.state.x)
    for symbol, tensors in expected.state.memory.items():
        same(got.state.memory[symbol], tensors)
    assert got.state.x["weight"].item() > 1.0199
    assert torch.equal(got.parameters["weight"], expected.state.x["weight"].to(dtype))
    assert got.parameters["weight"].item() > 1.015


def test_clients_get_the_model_s_dtypes_from_its_own_memory() -> None:
    """The layout is that of the task's model, and the bundle is the memory of the kept parameters."""
    tested = tiny_engine("bfloat16")
    snapshot = tested.first()
    model, direction = tested.outgoing(snapshot)
    assert {str(entry.dtype) for entry in model.layout.entries} == {"torch.bfloat16", "torch.float32", "torch.int64"}
    assert direction.tensors[LAYER].dtype == torch.bfloat16
    sent = make_broadcast(model, 1 << 20)
    snapshot.rounded[LAYER].fill_(2.0)
    assert torch.frombuffer(bytearray(sent.bundle), dtype=torch.bfloat16)[0] == 2.0


@pytest.mark.parametrize("method", ["fedcm", "fedadam", "scaffold", "qg"])
def test_the_bits_are_those_of_the_algorithms_in_memory(tmp_path: Path, method: str) -> None:
    """Of x and every memory, for a model that has a layer of low precision and one of float32."""
    tested = tiny_engine("bfloat16", algorithm={"name": method}, population=3, round={"clients_per_round": 3})
    snapshot = tested.first()
    state = snapshot.state
    for _ in range(3):
        cohort, paths, tensors = updates(tested, tmp_path)
        snapshot, _ = tested.server_update(snapshot, cohort, paths)
        info = round_info(tested.config, snapshot.round, 3)
        sent = [(each, delta) for each, (delta, _) in zip(cohort, tensors, strict=True)]
        state = fl.apply_updates(tested.algorithm, state, sent, info)
        same(snapshot.state.x, state.x)
        for symbol, expected in state.memory.items():
            same(snapshot.state.memory[symbol], expected)
        same(snapshot.parameters, state.as_sent(state.x))


def test_a_checkpoint_keeps_the_master(tmp_path: Path) -> None:
    """What is read is what was saved, and the file of the model has the model's dtype."""
    tested = tiny_engine("bfloat16")
    cohort, paths, _ = updates(tested, tmp_path)
    made, _ = tested.server_update(tested.first(), cohort, paths)
    saved = Checkpoints(tmp_path / "saved")
    saved.save("r", 0, tested.snapshots.checkpoint(made, {}))
    read = saved.latest("r")
    assert read is not None
    assert (list(read.master), read.model[LAYER].dtype) == (["first.weight", "first.bias"], torch.bfloat16)
    assert not torch.equal(read.master[LAYER], read.model[LAYER].float())
    again = tested.restored(read)
    same_snapshot(again, made)
    same(again.parameters, made.parameters)


def test_models_of_float32_have_no_master(tmp_path: Path) -> None:
    """The state is the model that is sent: no copy in memory, and no file."""
    tested = tiny_engine("batchnorm")
    first = tested.first()
    assert first.rounded == {}
    assert all(first.parameters[name] is tensor for name, tensor in first.state.x.items())
    folder = Checkpoints(tmp_path).save("r", -1, tested.snapshots.checkpoint(first, {}))
    meta = json.loads((folder / "meta.json").read_text())
    assert sorted(meta["files"]) == ["memory-Delta.safetensors", "model.safetensors"]


def test_a_model_that_its_dtype_cannot_hold_has_diverged(tmp_path: Path) -> None:
    """60,000 + 6,000 is more than the largest float16, though not too much for the master."""
    tested = engine(torch.float16, 60_000.0)
    with pytest.raises(Diverged, match="the model as float16 of round 0 is not finite; the first model stays"):
        after(tested, tested.first(), [6_000.0], tmp_path)


def test_a_direction_that_its_dtype_cannot_hold_has_diverged(tmp_path: Path) -> None:
    """FedCM's momentum is the delta over rate and steps: 10 / 0.0001."""
    tested = engine(torch.float16, method="fedcm", local={"learning_rate": 0.0001, "steps": 1})
    with pytest.raises(Diverged, match="the direction as float16 of round 0 is not finite"):
        after(tested, tested.first(), [10.0], tmp_path)


@pytest.mark.parametrize(
    ("sections", "start", "delta", "what"),
    [
        ({"encodings": {"model": "bf16"}}, 60_000.0, 5_500.0, "model after round 0 cannot be sent as bf16"),
        (
            {"encodings": {"direction": "bf16"}, "method": "fedcm", "local": {"learning_rate": 0.001, "steps": 1}},
            1.0,
            65.5,
            "direction after round 0 cannot be sent as bf16",
        ),
    ],
    ids=["model", "direction"],
)
def test_what_its_encoding_cannot_hold_has_diverged(
    tmp_path: Path, sections: dict[str, Any], start: float, delta: float, what: str
) -> None:
    """65,500 is a float16. The nearest bfloat16 is 65,536, which is none."""
    tested = engine(torch.float16, start, **sections)
    with pytest.raises(Diverged, match=f"the {what}: .*; the first model stays"):
        after(tested, tested.first(), [delta], tmp_path)
