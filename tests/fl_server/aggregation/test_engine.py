"""The engine gives the bits of the algorithms in memory: from files, through checkpoints, and for any model."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import algorithms as fl
from algorithms.aggregate import average_buffers
from fl_server.aggregation.engine import Engine
from fl_server.aggregation.outgoing import Broadcast, make_broadcast
from fl_server.aggregation.server_update import Diverged
from fl_server.aggregation.snapshot import Snapshot
from fl_server.errors import InvalidInput
from fl_server.store.checkpoints import Checkpoints
from fl_tasks import load_task
from protos.codec import Layout, pack, unpack
from protos.fl.v1 import coordinator_pb2 as pb
from tests.fl_server.harness import TASK, run_config
from tests.processes import tiny_task

METHODS: list[dict[str, Any]] = [
    {"name": "fedcm", "parameters": {"alpha": 0.3, "eta_g": 0.7, "weights": "examples"}},
    {"name": "fedcm", "parameters": {"alpha": 1.0}},
    {"name": "fedavg"},
]


def engine(model: str = "batchnorm", **sections: Any) -> Engine:
    """The engine of a run."""
    config = run_config(task={"name": TASK, "options": {"model": model}}, **sections)
    return Engine(config, load_task(config.task.name, config.task.options))


def same(first: fl.Tensors, second: fl.Tensors) -> None:
    """Equal names and bits."""
    assert list(first) == list(second)
    assert all(torch.equal(first[name], second[name]) for name in first)


def same_snapshot(first: Snapshot, second: Snapshot) -> None:
    """Equal in everything that one round passes to the next."""
    assert first.round == second.round
    same(first.state.x, second.state.x)
    same(first.buffers, second.buffers)
    assert list(first.state.memory) == list(second.state.memory)
    for symbol, tensors in first.state.memory.items():
        same(tensors, second.state.memory[symbol])


def updates(
    engine: Engine, tmp_path: Path, scale: float = 0.01
) -> tuple[list[fl.UpdateInfo], list[Path], list[tuple[fl.Tensors, fl.Tensors]]]:
    """Three updates, in the order of id bytes: cohort, files and tensors."""
    generator = torch.Generator().manual_seed(3)
    cohort = [fl.UpdateInfo(name, 5 + 7 * index, 2 + index) for index, name in enumerate(("B", "a", "b"))]
    first = engine.first()
    tensors, paths = [], []
    for info in cohort:
        wide = {name: scale * torch.randn(x.shape, generator=generator) for name, x in first.state.x.items()}
        delta = first.state.as_sent(wide)
        buffers = {
            name: torch.rand(x.shape, generator=generator) if x.is_floating_point() else x + info.num_steps
            for name, x in first.buffers.items()
        }
        path = tmp_path / info.client_id.join(("u", ".update"))
        path.write_bytes(pack({**delta, **buffers}, engine.layout))
        tensors.append((delta, buffers))
        paths.append(path)
    return cohort, paths, tensors


def test_the_first_model_is_a_function_of_the_seed() -> None:
    """Engines with the same seed agree, another seed gives another model, and torch's generator is unchanged."""
    before = torch.random.get_rng_state()
    first, again, other = engine(seed=1).first(), engine(seed=1).first(), engine(seed=2).first()
    same_snapshot(first, again)
    assert not torch.equal(first.state.x["0.weight"], other.state.x["0.weight"])
    assert (first.round, torch.equal(before, torch.random.get_rng_state())) == (-1, True)


@pytest.mark.parametrize("method", METHODS, ids=["fedcm", "alpha1", "fedavg"])
@pytest.mark.parametrize("model", ["plain", "batchnorm"])
def test_a_server_update_equals_the_update_in_memory(tmp_path: Path, method: dict[str, Any], model: str) -> None:
    """Three rounds with a decaying rate, bit for bit as `apply_updates` and `average_buffers` compute them."""
    local = {"learning_rate": 0.3, "learning_rate_decay": 0.9}
    run = engine(model, algorithm=method, local=local)
    algorithm = fl.build(method["name"], **method.get("parameters", {}))
    cohort, paths, tensors = updates(run, tmp_path)
    snapshot = run.first()
    state = algorithm.init(snapshot.state.x)
    for round_ in range(3):
        info = fl.RoundInfo(round_, 0.3 * 0.9**round_)
        shuffled = [(cohort[index], tensors[index][0]) for index in (2, 0, 1)]
        state = fl.apply_updates(algorithm, state, shuffled, info)
        snapshot, norms = run.server_update(snapshot, cohort, paths)
        same(snapshot.state.x, state.x)
        assert norms.aggregate > 0
    buffers = [buffers for _, buffers in tensors]
    same(snapshot.buffers, average_buffers(buffers, algorithm.weights(cohort)) if model == "batchnorm" else {})
    assert snapshot.round == 2


def test_counters_of_batchnorm_take_the_maximum(tmp_path: Path) -> None:
    """Clients made 2, 3 and 4 steps: the model's counter is 4."""
    run = engine()
    cohort, paths, _ = updates(run, tmp_path)
    snapshot, _ = run.server_update(run.first(), cohort, paths)
    assert snapshot.buffers["1.num_batches_tracked"].item() == 4


def test_the_norms_of_a_server_update_by_hand(tmp_path: Path) -> None:
    """The cosine is 0 without a direction, and 1 for a second equal step of FedCM.

    One client with alpha = 1/2: x moves by delta and Delta = -delta / (eta_l K), so movement and -Delta are parallel.
    """
    run = engine("plain", algorithm={"name": "fedcm", "parameters": {"alpha": 0.5}})
    cohort, paths, tensors = updates(run, tmp_path)
    snapshot, norms = run.server_update(run.first(), cohort[:1], paths[:1])
    length = math.sqrt(sum(float((delta.double() ** 2).sum()) for delta in tensors[0][0].values()))
    assert norms.aggregate == pytest.approx(length, rel=1e-4)
    assert (norms.direction, norms.cosine) == (0.0, 0.0)
    _, norms = run.server_update(snapshot, cohort[:1], paths[:1])
    assert norms.direction == pytest.approx(length / (0.1 * cohort[0].num_steps), rel=1e-4)
    assert norms.cosine == pytest.approx(1.0, abs=1e-4)


def test_a_server_update_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    """The last model is unchanged, and the message advises a lower learning rate."""
    run = engine("plain")
    cohort, paths, _ = updates(run, tmp_path, scale=3e38)
    first = run.first()
    with pytest.raises(Diverged, match="model of round 0 is not finite; the first model stays. Lower the learn"):
        run.server_update(first, cohort, paths)
    same_snapshot(first, engine("plain").first())


@pytest.mark.parametrize("model", ["batchnorm", "frozen"])
def test_a_checkpoint_restores_everything(tmp_path: Path, model: str) -> None:
    """Another engine reads it and computes the next round with the same bits. The frozen part is saved too."""
    run = engine(model)
    cohort, paths, _ = updates(run, tmp_path)
    snapshot, _ = run.server_update(run.first(), cohort, paths)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save("r", 0, run.snapshots.checkpoint(snapshot, {}))
    other = engine(model)
    latest = checkpoints.latest("r")
    assert latest is not None
    restored = other.restored(latest)
    same_snapshot(restored, snapshot)
    same_snapshot(other.server_update(restored, cohort, paths)[0], run.server_update(snapshot, cohort, paths)[0])
    same(other.snapshots.frozen, run.snapshots.frozen)


def saved(tmp_path: Path, model: str, seed: int) -> tuple[Path, Snapshot, fl.Tensors]:
    """The first model of this seed in a safetensors file: path, snapshot and frozen tensors."""
    other = engine(model, seed=seed)
    first = other.first()
    path = tmp_path / "start.safetensors"
    save_file({**first.state.x, **first.buffers, **other.snapshots.frozen}, path)
    return path, first, other.snapshots.frozen


@pytest.mark.parametrize("model", ["batchnorm", "frozen"])
def test_a_run_can_start_from_a_file(tmp_path: Path, model: str) -> None:
    """Parameters, buffers and frozen tensors come from the file, also after a restart without the file."""
    path, expected, frozen = saved(tmp_path, model, seed=99)
    run = engine(model, initial_model=str(path))
    first = run.first()
    same_snapshot(first, expected)
    same(run.snapshots.frozen, frozen)
    checkpoint = run.snapshots.checkpoint(first, {"round": -1})
    path.unlink()
    restarted = engine(model, initial_model=str(path))
    same_snapshot(restarted.restored(checkpoint), expected)
    same(restarted.snapshots.frozen, frozen)


def test_a_checkpoint_has_every_name_of_tied_weights(tmp_path: Path) -> None:
    """The file loads strictly into the task's model and can start another run; a restart reads the first names only."""
    run = engine("tied")
    first = run.first()
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save("r", 0, run.snapshots.checkpoint(first, {}))
    with checkpoints.open_model("r", 0) as file:
        path = Path(str(file.name))
    model = tiny_task.tied()
    model.load_state_dict(load_file(path), strict=True)
    same(fl.read_state(model).trainable, first.state.x)
    same_snapshot(engine("tied", seed=7, initial_model=str(path)).first(), first)
    latest = checkpoints.latest("r")
    assert latest is not None
    assert latest.model.keys() == first.state.x.keys()
    restarted = engine("tied")
    same(restarted.restored(latest).state.x, first.state.x)
    assert restarted.snapshots.frozen == {}


@pytest.mark.parametrize("kept", ["first.weight", "again.weight", "third.weight"])
def test_a_file_with_one_name_of_a_tied_weight_is_enough(tmp_path: Path, kept: str) -> None:
    """Other programs write a tied weight once, under any of its names."""
    run = engine("tied", seed=3)
    first = run.first()
    values = {**first.state.x, "again.bias": first.state.x["first.bias"].clone()}
    del values["first.bias"]
    path = tmp_path / "start.safetensors"
    save_file(
        {**{name: each for name, each in values.items() if name != "first.weight"}, kept: values["first.weight"]}, path
    )
    same_snapshot(engine("tied", initial_model=str(path)).first(), first)


@pytest.mark.parametrize("wrong", ["missing", "text", "another"])
def test_a_file_of_another_model_is_refused(tmp_path: Path, wrong: str) -> None:
    """A missing file, a text file, and a file of another model."""
    path = tmp_path / "start.safetensors"
    if wrong == "text":
        path.write_text("hello, this is no model")
    if wrong == "another":
        saved(tmp_path, "wide", 1)
    with pytest.raises(InvalidInput, match="initial_model: expected a safetensors file of this task's model"):
        engine("plain", initial_model=str(path)).first()


def test_the_first_model_must_be_a_regular_file(tmp_path: Path) -> None:
    """A pipe would block its reader for ever: it is refused, and so are a device and a directory."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero", tmp_path):
        with pytest.raises(InvalidInput, match="initial_model: expected a safetensors file of this task's model"):
            engine("plain", initial_model=str(path)).first()


def sent(broadcast: Broadcast) -> tuple[Layout, fl.Tensors]:
    """Layout and tensors of a broadcast."""
    parts = [pb.FetchModelResponse.FromString(broadcast.message(place)[0]) for place in broadcast.places(0)]
    layout = Layout.from_manifest(parts[0].header.manifest, 1 << 30)
    return layout, unpack(b"".join(part.chunk.data for part in parts[1:]), layout)


@pytest.mark.parametrize(
    ("model", "method", "kinds"),
    [
        ("batchnorm", "fedcm", ["model", "direction"]),
        ("plain", "fedavg", ["model"]),
        ("frozen", "fedcm", ["model", "direction", "frozen"]),
    ],
)
def test_the_bundles_of_a_round(tmp_path: Path, model: str, method: str, kinds: list[str]) -> None:
    """The model with buffers, the direction if the method has one, and the frozen part if there is one."""
    run = engine(model, algorithm={"name": method})
    cohort, paths, _ = updates(run, tmp_path)
    snapshot, _ = run.server_update(run.first(), cohort, paths)
    broadcasts = [make_broadcast(outgoing, 1 << 16) for outgoing in run.outgoing(snapshot)]
    assert [broadcast.kind for broadcast in broadcasts] == kinds
    by_kind = dict(zip(kinds, map(sent, broadcasts), strict=True))
    same(by_kind["model"][1], {**snapshot.state.x, **snapshot.buffers})
    assert {entry.name for entry in by_kind["model"][0].entries if entry.trainable} == set(snapshot.state.x)
    if "direction" in kinds:
        same(by_kind["direction"][1], snapshot.state.memory["Delta"])
    if "frozen" in kinds:
        same(by_kind["frozen"][1], run.snapshots.frozen)


def test_an_evaluation_is_of_the_snapshot() -> None:
    """A model of zeros gives equal probabilities: the loss is log 3, whatever was evaluated before."""
    run = engine("plain")
    first = run.first()
    zeros = type(first)(0, fl.ServerState({name: torch.zeros_like(x) for name, x in first.state.x.items()}), {})
    before = run.model.evaluate(first)
    assert run.model.evaluate(zeros)["loss"] == pytest.approx(1.0986123)
    assert run.model.evaluate(first) == before


def test_an_evaluation_on_another_device_leaves_the_model() -> None:
    """Metrics, and the module's use after it, are as without. A numbered CPU stands for the other device."""
    run = engine()
    elsewhere = Engine(run.config, load_task(run.config.task.name, run.config.task.options), torch.device("cpu", 0))
    for tested in (run, elsewhere):
        snapshot = tested.first()
        metrics = [tested.model.evaluate(snapshot) for _ in range(2)]
        assert metrics == [run.model.evaluate(run.first())] * 2
        same(tested.model.whole(snapshot), run.model.whole(run.first()))
