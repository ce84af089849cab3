"""Every method through every law: a new method is a new row of METHODS."""

import dataclasses
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

import algorithms as fl
from algorithms import tree

METHODS = [
    pytest.param("fedavg", {}, id="fedavg"),
    pytest.param("fedavg", {"eta_g": 0.5, "weights": "uniform"}, id="fedavg-uniform-half"),
    pytest.param("fedcm", {"alpha": 0.1}, id="fedcm-0.1"),
    pytest.param("fedcm", {"alpha": 0.5, "weights": "examples"}, id="fedcm-0.5-examples"),
    pytest.param("fedcm", {"alpha": 1.0}, id="fedcm-1"),
]
NEUTRAL = [pytest.param("fedcm", {"alpha": 1}, id="fedcm")]
"""Settings that must be FedAvg, bit for bit."""
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"))]

each_method = pytest.mark.parametrize(("name", "parameters"), METHODS)


def same(a, b):
    """Whether two states hold the same bits."""
    parts = [(a.x, b.x), *((a.memory[symbol], b.memory[symbol]) for symbol in a.memory)]
    return a.memory.keys() == b.memory.keys() and all(torch.equal(p[name], q[name]) for p, q in parts for name in p)


def copied(state):
    """A state that shares no tensor with the given one."""
    memory = {symbol: tree.map(torch.clone, tensors) for symbol, tensors in state.memory.items()}
    return fl.ServerState(tree.map(torch.clone, state.x), memory)


def assert_close(a, b):
    """Equal to 1e-12, all tensors of two states."""
    torch.testing.assert_close(a.x, b.x, rtol=0, atol=1e-12)
    torch.testing.assert_close(dict(a.memory), dict(b.memory), rtol=0, atol=1e-12)


@each_method
def test_mean_of_one_client_is_its_own_update(federation, name, parameters):
    """A cohort of one: Dbar is that client's delta, bit for bit."""
    algorithm = fl.build(name, **parameters)
    info, delta = federation.deltas(algorithm, algorithm.init(federation.x))[1]
    row = algorithm.sums([info], federation.round_info())["Dbar"]
    [mean] = fl.weighted_sums_of_tensors([delta], [row.coefficients])
    assert all(torch.equal(delta[key], mean[key]) for key in delta)


@each_method
def test_order_of_arrival_changes_no_bit(federation, name, parameters):
    """Updates are summed in the order of client ids, in whatever order they come."""
    algorithm = fl.build(name, **parameters)
    state = algorithm.init(federation.x)
    updates = federation.deltas(algorithm, state)
    forward, backward = (
        fl.apply_updates(algorithm, state, cohort, federation.round_info()) for cohort in (updates, updates[::-1])
    )
    assert same(forward, backward)


@each_method
def test_names_of_clients_do_not_matter(federation, name, parameters):
    """Other ids, so another order of summation: the same state to tolerance."""
    algorithm = fl.build(name, **parameters)
    other = {"ada": "z", "bob": "y", "cyd": "x"}
    renamed = dataclasses.replace(
        federation, clients=[dataclasses.replace(client, name=other[client.name]) for client in federation.clients]
    )
    assert_close(federation.play(algorithm, 3)[-1], renamed.play(algorithm, 3)[-1])


@each_method
def test_scale_of_weights_does_not_matter(federation, name, parameters):
    """Seven times the examples for everyone is the same state to tolerance, and the weights sum to one."""
    algorithm = fl.build(name, **parameters)
    state = algorithm.init(federation.x)
    updates = federation.deltas(algorithm, state)
    many = [(dataclasses.replace(info, num_examples=7 * info.num_examples), delta) for info, delta in updates]
    once, sevenfold = (
        fl.apply_updates(algorithm, state, cohort, federation.round_info()) for cohort in (updates, many)
    )
    assert_close(once, sevenfold)
    assert sum(algorithm.weights([info for info, _ in many])) == pytest.approx(1)


@each_method
def test_inputs_stay_unchanged(federation, name, parameters):
    """Neither training nor the server step writes into the state or the updates it was given."""
    algorithm = fl.build(name, **parameters)
    state = federation.play(algorithm, 1)[0]
    before = copied(state)
    updates = federation.deltas(algorithm, state)
    deltas_before = [tree.map(torch.clone, delta) for _, delta in updates]
    fl.apply_updates(algorithm, state, updates, federation.round_info(1))
    assert same(before, state)
    torch.testing.assert_close(deltas_before, [delta for _, delta in updates], rtol=0, atol=0)


@each_method
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_and_device_are_kept(federation, name, parameters, dtype, device):
    """Deltas and every tensor of the next state are of the model's dtype, on its device."""
    algorithm = fl.build(name, **parameters)
    there = dataclasses.replace(federation, x=tree.map(lambda tensor: tensor.to(device, dtype), federation.x))
    state = there.play(algorithm, 2)[-1]
    tensors = [state.x, *state.memory.values(), there.deltas(algorithm, state)[0][1]]
    assert {(t.dtype, t.device.type) for part in tensors for t in part.values()} == {(dtype, device)}


@each_method
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saved_state_gives_the_same_next_round(federation, name, parameters, dtype):
    """The state is whole: through bytes and back, the round that follows is the same bit for bit."""
    algorithm = fl.build(name, **parameters)
    federation = dataclasses.replace(federation, x=tree.map(lambda tensor: tensor.to(dtype), federation.x))
    state = federation.play(algorithm, 2)[-1]
    memory = {symbol: load(save(tensors)) for symbol, tensors in state.memory.items()}
    restored = fl.ServerState(load(save(state.x)), memory)
    assert same(federation.play(algorithm, 1, state)[0], federation.play(algorithm, 1, restored)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "parameters"), NEUTRAL)
def test_neutral_setting_is_fedavg(federation, name, parameters, dtype):
    """Switched off, at equal aggregation weights, a method is FedAvg bit for bit, with decay and unequal K_i."""
    federation = dataclasses.replace(
        federation,
        x=tree.map(lambda tensor: tensor.to(dtype), federation.x),
        settings=fl.LocalSettings(0.07, weight_decay=0.01),
    )
    fedavg = federation.play(fl.build("fedavg", weights="uniform"), 4)
    neutral = federation.play(fl.build(name, weights="uniform", **parameters), 4)
    assert all(torch.equal(a.x[key], b.x[key]) for a, b in zip(fedavg, neutral, strict=True) for key in federation.x)


@pytest.mark.parametrize(("name", "parameters"), NEUTRAL)
def test_neutral_setting_never_reads_the_direction(federation, name, parameters):
    """A NaN in a direction that is switched off does not reach the client's model."""
    client = federation.clients[0]
    rule = fl.build(name, **parameters).local_rule(tree.full_like(federation.x, float("nan")))
    plain, neutral = (federation.train(client, federation.x, r).delta for r in (fl.LocalRule(), rule))
    assert all(torch.equal(plain[key], neutral[key]) for key in plain)


@each_method
def test_path_shifts_with_the_problem(federation, name, parameters):
    """Translation: moving every f_i and x_0 by one vector moves the whole path by it, and no memory."""
    algorithm = fl.build(name, **parameters)
    by = torch.tensor([3.0, -1.0, 2.0], dtype=torch.float64)
    for here, there in zip(federation.play(algorithm, 5), federation.shifted(by).play(algorithm, 5), strict=True):
        moved = {"head": here.x["head"] + by[:2], "tail": here.x["tail"] + by[2]}
        assert_close(fl.ServerState(moved, here.memory), there)


@each_method
def test_single_full_steps_reach_the_optimum(federation, name, parameters):
    """K = 1 with full batches and all clients: the minimiser of sum p_i f_i, where sum p_i grad f_i = 0."""
    algorithm = fl.build(name, **parameters)
    federation = dataclasses.replace(federation.with_steps(1), settings=fl.LocalSettings(0.4))
    end = federation.play(algorithm, 500)[-1].x
    y = torch.cat([end["head"], end["tail"].flatten()])
    p = algorithm.weights([client.info for client in federation.clients])
    slope = sum(p_i * client.gradient(y) for p_i, client in zip(p, federation.clients, strict=True))
    assert slope.norm() < 1e-9


@each_method
@given(data=st.data())
@settings(max_examples=20)
def test_cutting_into_blocks_changes_no_bit(name, parameters, data):
    """Sums of slices, cut anywhere, are the slices of the sums."""
    n, seed = data.draw(st.integers(1, 200)), data.draw(st.integers(0, 2**31))
    cuts = sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=6))})
    blocks = list(torch.randn(3, n, generator=torch.Generator().manual_seed(seed)))
    cohort = [fl.UpdateInfo(client, size, size) for client, size in (("a", 3), ("b", 7), ("c", 11))]
    rows = [s.coefficients for s in fl.build(name, **parameters).sums(cohort, fl.RoundInfo(0, 0.3)).values()]
    whole = fl.weighted_sums(blocks, rows)
    pieces = [fl.weighted_sums((block[start:end] for block in blocks), rows) for start, end in pairwise(cuts)]
    assert all(torch.equal(total, torch.cat(parts)) for total, *parts in zip(whole, *pieces, strict=True))
