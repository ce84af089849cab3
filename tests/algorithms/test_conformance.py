"""Every method satisfies every law. A new method is a new row of METHODS."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

import algorithms as fl
from algorithms import tree
from tests.algorithms.federation import UNEVEN, Federation, RunState, flat, total

ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "fedavg": ("fedavg", {}),
    "fedavg-uniform-half": ("fedavg", {"eta_g": 0.5, "weights": "uniform"}),
    "fedavgm-nesterov": ("fedavgm", {"beta": 0.7}),
    "fedavgm-heavy-ball": ("fedavgm", {"beta": 0.7, "variant": "heavy_ball", "momentum_units": "gradient"}),
    "fedadagrad": ("fedadagrad", {}),
    "fedyogi": ("fedyogi", {}),
    "fedadam": ("fedadam", {}),
    "fedadam-corrected": ("fedadam", {"bias_correction": True, "v_from": "m", "momentum_units": "gradient"}),
    "feddemon": ("feddemon", {}),
    "feddemonadam": ("feddemonadam", {}),
    "feddemonadam-outside": ("feddemonadam", {"eps_inside": False}),
    "slowmo": ("slowmo", {}),
    "fedprox": ("fedprox", {"mu": 0.3}),
    "fednova": ("fednova", {}),
    "scaffold-II": ("scaffold", {}),
    "scaffold-I": ("scaffold", {"option": "I"}),
    "scaffold-examples": ("scaffold", {"objective": "examples"}),
    "feddyn": ("feddyn", {"alpha": 1.0}),
    "feddyn-examples": ("feddyn", {"alpha": 1.0, "objective": "examples"}),
    "feddyn-feddyn_code": ("feddyn", {"alpha": 0.5, "order": "feddyn_code"}),
    "fedcm-0.1": ("fedcm", {"alpha": 0.1}),
    "fedcm-0.5-examples": ("fedcm", {"alpha": 0.5, "weights": "examples"}),
    "fedcm-1": ("fedcm", {"alpha": 1.0}),
    "fedcm-feddyn_code": ("fedcm", {"order": "feddyn_code"}),
    "mimelite": ("mimelite", {"beta": 0.6}),
    "mime": ("mime", {"beta": 0.6}),
    "mime-undamped": ("mime", {"beta": 0.3, "damp": False}),
    "fedsam": ("fedsam", {}),
    "fedsam-tensor": ("fedsam", {"sam_scope": "tensor"}),
    "mofedsam": ("mofedsam", {}),
    "fedrobust": ("fedrobust", {"eta_2": 0.1}),
    "fedrobust-matrix": ("fedrobust", {"eta_2": 0.1, "L": "matrix"}),
    "qg": ("qg", {"beta": 0.5, "mu": 0.5}),
    "mfl": ("mfl", {"gamma": 0.5}),
    "fedcm-adam": ("fedcm", {"server_optimizer": "adam"}),
    "mimelite-demon_adam-sam": ("mimelite", {"server_optimizer": "demon_adam", "gradient": "sam"}),
    "scaffold-momentum-fednova": (
        "scaffold",
        {"server_optimizer": "momentum", "server_beta": 0.5, "normaliser": "fednova"},
    ),
    "feddyn-nesterov": ("feddyn", {"alpha": 1.0, "server_optimizer": "nesterov", "server_beta": 0.3}),
    "mfl-slowmo": ("mfl", {"gamma": 0.3, "server_optimizer": "slowmo"}),
}
"""Method and parameters by the row's name."""
METHODS = [pytest.param(*row, id=id) for id, row in ROWS.items()]
NEUTRAL = [
    pytest.param("fedcm", {"alpha": 1}, id="fedcm"),
    pytest.param("fedavgm", {"beta": 0}, id="fedavgm-nesterov"),
    pytest.param("fedavgm", {"beta": 0, "variant": "heavy_ball"}, id="fedavgm-heavy-ball"),
    pytest.param("feddemon", {"beta0": 0}, id="feddemon"),
    pytest.param("fedprox", {"mu": 0}, id="fedprox"),
    pytest.param("mimelite", {"beta": 0}, id="mimelite"),
    pytest.param("fedsam", {"rho": 0}, id="fedsam"),
    pytest.param("mofedsam", {"rho": 0, "beta": 1}, id="mofedsam"),
    pytest.param("fedrobust", {"eta_2": 0}, id="fedrobust"),
    pytest.param("fedrobust", {"eta_2": 0, "L": "matrix"}, id="fedrobust-matrix"),
    pytest.param("qg", {"beta": 0}, id="qg"),
    pytest.param("mfl", {"gamma": 0}, id="mfl"),
]
"""Settings that must equal FedAvg bit for bit."""
NO_SINGLE_STEP_OPTIMUM = {
    "its steps keep their size near the optimum": (
        "fedadagrad",
        "fedyogi",
        "fedadam",
        "fedadam-corrected",
        "feddemonadam",
        "feddemonadam-outside",
        "fedcm-adam",
        "mimelite-demon_adam-sam",
    ),
    "gradients are taken at a distance rho, also near the optimum": ("fedsam", "fedsam-tensor", "mofedsam"),
    "it wants local problems solved": ("feddyn", "feddyn-examples", "feddyn-feddyn_code", "feddyn-nesterov"),
    "it minimises another objective": ("fedrobust", "fedrobust-matrix"),
}
"""Why a row cannot end where sum p_i grad f_i = 0."""
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"))]

each_method = pytest.mark.parametrize(("name", "parameters"), METHODS)


def parts(standing: RunState) -> dict[str, fl.Tensors]:
    """Owner -> all tensors of a run."""
    named = {"x": standing.server.x, **{f"server {symbol}": kept for symbol, kept in standing.server.memory.items()}}
    for client, memory in sorted(standing.clients.items()):
        named |= {f"{client} {symbol}": kept for symbol, kept in memory.items()}
    return named


def same(a: RunState, b: RunState) -> bool:
    """Whether two runs hold the same bits."""
    one, other = parts(a), parts(b)
    return one.keys() == other.keys() and all(
        torch.equal(one[part][name], other[part][name]) for part in one for name in one[part]
    )


def mapped(function: Callable[[fl.Tensors], fl.Tensors], standing: RunState) -> RunState:
    """A run with `function` applied to its named tensors."""
    server = standing.server
    memory = {symbol: function(tensors) for symbol, tensors in server.memory.items()}
    clients = {
        client: {symbol: function(kept) for symbol, kept in own.items()} for client, own in standing.clients.items()
    }
    return RunState(fl.ServerState(function(server.x), memory), clients)


def assert_close(a: RunState, b: RunState) -> None:
    """Equal to 1e-12, all tensors of two runs."""
    torch.testing.assert_close(parts(a), parts(b), rtol=0, atol=1e-12)


def test_every_method_has_a_row() -> None:
    """Every method that can be built is tested here."""
    assert {name for name, _ in ROWS.values()} == set(fl.names())


@each_method
def test_mean_of_one_client_is_its_own_update(federation: Federation, name: str, parameters: dict[str, Any]) -> None:
    """A cohort of one: Dbar is that client's delta, bit for bit."""
    algorithm = fl.build(name, **parameters)
    client, delta = federation.clients[1], federation.train(federation.clients[1], federation.x, fl.LocalRule()).delta
    row = algorithm.sums([client.info], federation.round_info())["Dbar"]
    [mean] = fl.weighted_sums_of_tensors([delta], [row.coefficients])
    assert all(torch.equal(delta[key], mean[key]) for key in delta)


@each_method
def test_order_of_arrival_changes_no_bit(federation: Federation, name: str, parameters: dict[str, Any]) -> None:
    """Updates are summed in the order of client ids, not of their arrival."""
    algorithm = fl.build(name, **parameters)
    forward = federation.run(algorithm, UNEVEN)[-1]
    backward = federation.run(
        algorithm, [dataclasses.replace(round, arrange=lambda updates: updates[::-1]) for round in UNEVEN]
    )[-1]
    assert same(forward, backward)


@each_method
def test_names_of_clients_do_not_matter(federation: Federation, name: str, parameters: dict[str, Any]) -> None:
    """With other ids, and so another order of summation, the state is the same to tolerance."""
    algorithm = fl.build(name, **parameters)
    other = {"ada": "z", "bob": "y", "cyd": "x"}
    renamed = dataclasses.replace(
        federation, clients=[dataclasses.replace(client, name=other[client.name]) for client in federation.clients]
    )
    here, there = federation.run(algorithm, UNEVEN)[-1], renamed.run(algorithm, UNEVEN)[-1]
    assert_close(dataclasses.replace(here, clients={other[name]: own for name, own in here.clients.items()}), there)


@each_method
def test_scale_of_weights_does_not_matter(federation: Federation, name: str, parameters: dict[str, Any]) -> None:
    """With seven times the examples for every client the state is the same to tolerance. The weights sum to one."""
    algorithm = fl.build(name, **parameters)
    many = dataclasses.replace(
        federation,
        clients=[dataclasses.replace(c, A=c.A.repeat(7, 1), b=c.b.repeat(7)) for c in federation.clients],
    )
    assert_close(federation.run(algorithm, UNEVEN[:3])[-1], many.run(algorithm, UNEVEN[:3])[-1])
    assert sum(algorithm.weights([client.info for client in many.clients])) == pytest.approx(1)


@each_method
def test_inputs_stay_unchanged(federation: Federation, name: str, parameters: dict[str, Any]) -> None:
    """Neither training nor the server step writes into the state, the direction or the updates it was given."""
    algorithm = fl.build(name, **parameters)
    standing = federation.run(algorithm, UNEVEN[:2])[-1]
    before = mapped(lambda tensors: tree.map(torch.clone, tensors), standing)
    sent: list[Mapping[fl.Payload, fl.Tensors]] = []
    copies: list[Mapping[fl.Payload, fl.Tensors]] = []

    def watched(updates: list[fl.Update]) -> list[fl.Update]:
        sent.extend(payloads for _, payloads in updates)
        copies.extend({p: tree.map(torch.clone, tensors) for p, tensors in each.items()} for _, each in updates)
        return updates

    federation.after(algorithm, standing, dataclasses.replace(UNEVEN[2], arrange=watched))
    assert same(before, standing)
    torch.testing.assert_close(sent, copies, rtol=0, atol=0)


@each_method
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_and_device_are_kept(
    federation: Federation, name: str, parameters: dict[str, Any], dtype: torch.dtype, device: str
) -> None:
    """Every tensor of server and clients is of the model's dtype, on its device."""
    algorithm = fl.build(name, **parameters)
    there = dataclasses.replace(federation, x=tree.map(lambda tensor: tensor.to(device, dtype), federation.x))
    tensors = parts(there.run(algorithm, UNEVEN[:2])[-1])
    assert {(t.dtype, t.device.type) for part in tensors.values() for t in part.values()} == {(dtype, device)}


@each_method
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_resumed_run_equals_the_uninterrupted_one(
    federation: Federation, name: str, parameters: dict[str, Any], dtype: torch.dtype
) -> None:
    """The state is complete: after a save and a load, with absent clients, the end is the same bit for bit."""
    algorithm = fl.build(name, **parameters)
    federation = dataclasses.replace(federation, x=tree.map(lambda tensor: tensor.to(dtype), federation.x))
    whole = federation.run(algorithm, UNEVEN)
    restored = mapped(lambda tensors: load(save(tensors)), whole[2])
    again = fl.build(algorithm.name, **algorithm.parameters)
    assert same(whole[-1], federation.run(again, UNEVEN[3:], restored)[-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "parameters"), NEUTRAL)
def test_neutral_setting_is_fedavg(
    federation: Federation, name: str, parameters: dict[str, Any], dtype: torch.dtype
) -> None:
    """With neutral settings and equal weights a method equals FedAvg bit for bit in every round."""
    federation = dataclasses.replace(
        federation,
        x=tree.map(lambda tensor: tensor.to(dtype), federation.x),
        settings=fl.LocalSettings(0.07, weight_decay=0.01),
    )
    fedavg = federation.run(fl.build("fedavg", weights="uniform"), UNEVEN)
    neutral = federation.run(fl.build(name, weights="uniform", **parameters), UNEVEN)
    assert all(
        torch.equal(a.server.x[key], b.server.x[key])
        for a, b in zip(fedavg, neutral, strict=True)
        for key in a.server.x
    )


@pytest.mark.parametrize(("name", "parameters"), NEUTRAL)
def test_neutral_setting_never_reads_the_direction(
    federation: Federation, name: str, parameters: dict[str, Any]
) -> None:
    """A NaN in a direction that is switched off does not reach the client's model."""
    client = federation.clients[0]
    rule = fl.build(name, **parameters).local_rule(tree.full_like(federation.x, float("nan")))
    plain, neutral = (federation.train(client, federation.x, r).delta for r in (fl.LocalRule(), rule))
    assert all(torch.equal(plain[key], neutral[key]) for key in plain)


@each_method
def test_path_shifts_with_the_problem(federation: Federation, name: str, parameters: dict[str, Any]) -> None:
    """Translation: moving every f_i and x_0 by one vector moves the whole path by it, and no memory."""
    if name == "fedrobust":
        pytest.skip("its ascent stretches the inputs, and so the shift")
    algorithm = fl.build(name, **parameters)
    by = torch.tensor([3.0, -1.0, 2.0], dtype=torch.float64)
    heres, theres = (each.run(algorithm, UNEVEN) for each in (federation, federation.shifted(by)))
    for here, there in zip(heres, theres, strict=True):
        x = {"head": here.server.x["head"] + by[:2], "tail": here.server.x["tail"] + by[2]}
        assert_close(dataclasses.replace(here, server=here.server.replace(x=x)), there)


@pytest.mark.parametrize(
    "row", [row for row in ROWS if all(row not in rows for rows in NO_SINGLE_STEP_OPTIMUM.values())]
)
def test_single_full_steps_reach_the_optimum(conditioned: Federation, row: str) -> None:
    """K = 1 with full batches and all clients: the minimiser of sum p_i f_i, where sum p_i grad f_i = 0."""
    name, parameters = ROWS[row]
    algorithm = fl.build(name, **parameters)
    rounds = 400 if parameters.get("alpha", 0.1) == 0.1 and name == "fedcm" else 160  # its momentum of 0.9 is slow
    federation = dataclasses.replace(conditioned.with_steps(1), settings=fl.LocalSettings(0.4), planned=rounds)
    y = flat(federation.play(algorithm, rounds)[-1].x)
    p = algorithm.weights([client.info for client in federation.clients])
    if algorithm.objective == "examples":
        p = fl.example_weights([client.info for client in federation.clients])
    slope = total(p_i * client.gradient(y) for p_i, client in zip(p, federation.clients, strict=True))
    assert slope.norm() < 1e-8


@each_method
@given(data=st.data())
@settings(max_examples=5)
def test_cutting_into_blocks_changes_no_bit(name: str, parameters: dict[str, Any], data: st.DataObject) -> None:
    """Sums of slices, cut anywhere, are the slices of the sums."""
    n, seed = data.draw(st.integers(1, 200)), data.draw(st.integers(0, 2**31))
    cuts = sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=6))})
    blocks = list(torch.randn(3, n, generator=torch.Generator().manual_seed(seed)))
    cohort = [fl.UpdateInfo(client, size, size) for client, size in (("a", 3), ("b", 7), ("c", 11))]
    info = fl.RoundInfo(0, 0.3, population=9, population_examples=70, cohort_size=3)
    rows = [s.coefficients for s in fl.build(name, **parameters).sums(cohort, info).values()]
    whole = fl.weighted_sums(blocks, rows)
    pieces = [fl.weighted_sums((block[start:end] for block in blocks), rows) for start, end in pairwise(cuts)]
    assert all(torch.equal(total, torch.cat(parts)) for total, *parts in zip(whole, *pieces, strict=True))


@each_method
def test_clipped_update_equals_a_shorter_one(federation: Federation, name: str, parameters: dict[str, Any]) -> None:
    """A delta admitted at a factor gives the server and client states of a delta of that length."""
    algorithm = fl.build(name, **parameters)
    clipped = dataclasses.replace(UNEVEN[0], clip={"bob": 0.25})

    def quartered(updates: list[fl.Update]) -> list[fl.Update]:
        return [
            (
                dataclasses.replace(info, clip_factor=1.0),
                {**sent, "delta": tree.scale(sent["delta"], info.clip_factor)} if "delta" in sent else sent,
            )
            for info, sent in updates
        ]

    by_factor = federation.run(algorithm, [clipped])[0].server
    by_hand = federation.run(algorithm, [dataclasses.replace(clipped, arrange=quartered)])[0].server
    assert_close(RunState(by_factor), RunState(by_hand))
