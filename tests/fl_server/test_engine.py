"""What a run computes: the same bits as the algorithms in memory, from files, through checkpoints, on any model."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import save_file

import algorithms as fl
from algorithms.aggregate import average_buffers
from fl_server.broadcast import make_broadcast
from fl_server.engine import Engine
from fl_server.errors import InvalidInput
from fl_server.step import Diverged
from fl_server.store.checkpoints import Checkpoints
from protos.codec import Layout, pack, unpack
from protos.fl.v1 import coordinator_pb2 as pb
from tasks import load_task
from tests.fl_server.harness import TASK, run_config

METHODS = [
    {"name": "fedcm", "parameters": {"alpha": 0.3, "eta_g": 0.7, "weights": "examples"}},
    {"name": "fedcm", "parameters": {"alpha": 1.0}},
    {"name": "fedavg"},
]


def engine(model="batchnorm", **sections):
    """The engine of a run."""
    config = run_config(task={"name": TASK, "options": {"model": model}}, **sections)
    return Engine(config, load_task(config.task.name, config.task.options))


def same(first, second):
    """Equal names and bits."""
    assert list(first) == list(second)
    assert all(torch.equal(first[name], second[name]) for name in first)


def same_snapshot(first, second):
    """Equal in all that passes from round to round."""
    assert first.round == second.round
    same(first.state.x, second.state.x)
    same(first.buffers, second.buffers)
    assert list(first.state.memory) == list(second.state.memory)
    for symbol, tensors in first.state.memory.items():
        same(tensors, second.state.memory[symbol])


def updates(engine, tmp_path, scale=0.01):
    """Three clients' facts, files and tensors, in the order of id bytes."""
    chance = torch.Generator().manual_seed(3)
    cohort = [fl.UpdateInfo(name, 5 + 7 * index, 2 + index) for index, name in enumerate(("B", "a", "b"))]
    first = engine.first()
    tensors, paths = [], []
    for info in cohort:
        delta = {name: scale * torch.randn(x.shape, generator=chance) for name, x in first.state.x.items()}
        buffers = {
            name: torch.rand(x.shape, generator=chance) if x.is_floating_point() else x + info.num_steps
            for name, x in first.buffers.items()
        }
        path = tmp_path / info.client_id.join(("u", ".update"))
        path.write_bytes(pack({**delta, **buffers}, engine.layout))
        tensors.append((delta, buffers))
        paths.append(path)
    return cohort, paths, tensors


def test_the_first_model_is_a_function_of_the_seed():
    """The same for every engine, another for another seed, and torch's own generator is left alone."""
    before = torch.random.get_rng_state()
    first, again, other = engine(seed=1).first(), engine(seed=1).first(), engine(seed=2).first()
    same_snapshot(first, again)
    assert not torch.equal(first.state.x["0.weight"], other.state.x["0.weight"])
    assert (first.round, torch.equal(before, torch.random.get_rng_state())) == (-1, True)


@pytest.mark.parametrize("method", METHODS, ids=["fedcm", "alpha1", "fedavg"])
@pytest.mark.parametrize("model", ["plain", "batchnorm"])
def test_a_step_is_the_step_in_memory(tmp_path, method, model):
    """Three rounds, bit for bit as `apply_updates` and `average_buffers` make them, with a rate that decays."""
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
        snapshot, norms = run.step(snapshot, cohort, paths)
        same(snapshot.state.x, state.x)
        assert norms.aggregate > 0
    buffers = [buffers for _, buffers in tensors]
    same(snapshot.buffers, average_buffers(buffers, algorithm.weights(cohort)) if model == "batchnorm" else {})
    assert snapshot.round == 2


def test_counters_of_batchnorm_take_the_maximum(tmp_path):
    """Clients made 2, 3 and 4 steps: the model has seen 4."""
    run = engine()
    cohort, paths, _ = updates(run, tmp_path)
    snapshot, _ = run.step(run.first(), cohort, paths)
    assert snapshot.buffers["1.num_batches_tracked"].item() == 4


def test_the_norms_of_a_step_by_hand(tmp_path):
    """Without a direction there is no cosine; a second equal step of FedCM goes where the direction points.

    One client with alpha = 1/2: x moves by delta and Delta = -delta / (eta_l K), so movement and -Delta are parallel.
    """
    run = engine("plain", algorithm={"name": "fedcm", "parameters": {"alpha": 0.5}})
    cohort, paths, tensors = updates(run, tmp_path)
    snapshot, norms = run.step(run.first(), cohort[:1], paths[:1])
    length = torch.sqrt(sum((delta.double() ** 2).sum() for delta in tensors[0][0].values())).item()
    assert norms.aggregate == pytest.approx(length, rel=1e-4)
    assert (norms.direction, norms.cosine) == (0.0, 0.0)
    _, norms = run.step(snapshot, cohort[:1], paths[:1])
    assert norms.direction == pytest.approx(length / (0.1 * cohort[0].num_steps), rel=1e-4)
    assert norms.cosine == pytest.approx(1.0, abs=1e-4)


def test_a_step_that_is_not_finite_is_refused(tmp_path):
    """The last model is not touched, and the message says what to do."""
    run = engine("plain")
    cohort, paths, _ = updates(run, tmp_path, scale=3e38)
    first = run.first()
    with pytest.raises(Diverged, match="model of round 0 is not finite; the model of round -1 stays. Lower the learn"):
        run.step(first, cohort, paths)
    same_snapshot(first, engine("plain").first())


@pytest.mark.parametrize("model", ["batchnorm", "frozen"])
def test_a_checkpoint_brings_everything_back(tmp_path, model):
    """Saved, read by another engine, and stepped: the same bits as without; the frozen part is saved too."""
    run = engine(model)
    cohort, paths, _ = updates(run, tmp_path)
    snapshot, _ = run.step(run.first(), cohort, paths)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save("r", 0, run.to_checkpoint(snapshot, {}))
    other = engine(model)
    back = other.from_checkpoint(checkpoints.latest("r"))
    same_snapshot(back, snapshot)
    same_snapshot(other.step(back, cohort, paths)[0], run.step(snapshot, cohort, paths)[0])
    same(other.frozen, run.frozen)


def saved(tmp_path, model, seed):
    """The first model of another seed as a safetensors file, and that model's state."""
    other = engine(model, seed=seed)
    first = other.first()
    path = tmp_path / "start.safetensors"
    save_file({**first.state.x, **first.buffers, **other.frozen}, path)
    return path, first, other.frozen


@pytest.mark.parametrize("model", ["batchnorm", "frozen"])
def test_a_run_can_start_from_a_file(tmp_path, model):
    """All of the file counts: parameters, buffers, and what is frozen; also after a restart without the file."""
    path, expected, frozen = saved(tmp_path, model, seed=99)
    run = engine(model, initial_model=str(path))
    first = run.first()
    same_snapshot(first, expected)
    same(run.frozen, frozen)
    checkpoint = run.to_checkpoint(first, {"round": -1})
    path.unlink()
    restarted = engine(model, initial_model=str(path))
    same_snapshot(restarted.from_checkpoint(checkpoint), expected)
    same(restarted.frozen, frozen)


@pytest.mark.parametrize("wrong", ["missing", "text", "another"])
def test_a_file_that_is_not_of_the_model_is_refused(tmp_path, wrong):
    """Missing, no safetensors file, or another model's."""
    path = tmp_path / "start.safetensors"
    if wrong == "text":
        path.write_text("hello, this is no model")
    if wrong == "another":
        saved(tmp_path, "wide", 1)
    with pytest.raises(InvalidInput, match="initial_model: expected a safetensors file of this task's model"):
        engine("plain", initial_model=str(path)).first()


def test_a_first_model_is_a_file(tmp_path):
    """A pipe, for which a reader would wait for ever, is refused as a device is."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero", tmp_path):
        with pytest.raises(InvalidInput, match="initial_model: expected a safetensors file of this task's model"):
            engine("plain", initial_model=str(path)).first()


def sent(broadcast):
    """Layout and tensors of what is sent out."""
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
def test_what_is_sent_down(tmp_path, model, method, kinds):
    """Model with buffers, the direction of methods that have one, and the frozen part if there is one."""
    run = engine(model, algorithm={"name": method})
    cohort, paths, _ = updates(run, tmp_path)
    snapshot, _ = run.step(run.first(), cohort, paths)
    broadcasts = [make_broadcast(outgoing, 1 << 16) for outgoing in run.outgoing(snapshot)]
    assert [broadcast.kind for broadcast in broadcasts] == kinds
    by_kind = dict(zip(kinds, map(sent, broadcasts), strict=True))
    same(by_kind["model"][1], {**snapshot.state.x, **snapshot.buffers})
    assert {entry.name for entry in by_kind["model"][0].entries if entry.trainable} == set(snapshot.state.x)
    if "direction" in kinds:
        same(by_kind["direction"][1], snapshot.state.memory["Delta"])
    if "frozen" in kinds:
        same(by_kind["frozen"][1], run.frozen)


def test_an_evaluation_is_of_the_snapshot():
    """A model of zeros says class 0 to everything: the loss is log 3, and the engine's own model does not matter."""
    run = engine("plain")
    first = run.first()
    zeros = type(first)(0, fl.ServerState({name: torch.zeros_like(x) for name, x in first.state.x.items()}), {})
    before = run.evaluate(first)
    assert run.evaluate(zeros)["loss"] == pytest.approx(1.0986123)
    assert run.evaluate(first) == before
