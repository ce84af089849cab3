"""Identities between methods, and methods that reach the exact minimiser."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import algorithms as fl
from algorithms.conformance.federation import UNEVEN, Federation, Round, flat
from tests.algorithms.optimum import minimiser
from tests.marks import slow_except


def end(federation: Federation, name: str, rounds: Sequence[Round] = UNEVEN, /, **parameters: object) -> Tensor:
    """x after some rounds."""
    return flat(federation.run(fl.build(name, **parameters), rounds)[-1].server.x)


def assert_close(a: Tensor, b: Tensor) -> None:
    """Equal to 1e-12."""
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_slowmo_without_memory_is_fedavg(federation: Federation) -> None:
    """beta = 0 and slow rate 1, with a decaying rate; they round differently."""
    assert_close(end(federation, "slowmo", beta=0), end(federation, "fedavg", weights="uniform"))


def test_slowmo_is_fedavgm_at_a_constant_rate(federation: Federation) -> None:
    """SlowMo(b, a) = FedAvgM(b, eta_g = a); with a decaying rate they are two methods."""
    constant = [Round(t) for t in range(6)]
    heavy = {"beta": 0.6, "eta_g": 0.8, "variant": "heavy_ball", "weights": "uniform"}
    slow = {"beta": 0.6, "eta_g": 0.8}
    assert_close(end(federation, "slowmo", constant, **slow), end(federation, "fedavgm", constant, **heavy))
    assert (end(federation, "slowmo", **slow) - end(federation, "fedavgm", **heavy)).norm() > 1e-3


def test_fedavgm_in_units_of_a_gradient_is_slowmo(federation: Federation) -> None:
    """Brought to the round's rate first, v = - eta_l u: one path, also when the rate decays."""
    heavy = {"variant": "heavy_ball", "weights": "uniform", "momentum_units": "gradient"}
    assert_close(end(federation, "fedavgm", beta=0.6, **heavy), end(federation, "slowmo", beta=0.6))


@pytest.mark.parametrize(
    ("method", "optimizer", "own"),
    [
        ("fedavgm", "nesterov", {"beta": 0.6}),
        ("slowmo", "slowmo", {"beta": 0.6}),
        ("feddemon", "demon", {"beta0": 0.6}),
        ("fedadagrad", "adagrad", {"tau": 0.1}),
        ("fedyogi", "yogi", {"beta1": 0.5}),
        ("fedadam", "adam", {"beta2": 0.8}),
        ("feddemonadam", "demon_adam", {"eps": 0.1}),
    ],
)
def test_methods_with_an_optimizer_are_fedavg_with_it(
    federation: Federation, method: str, optimizer: str, own: dict[str, float]
) -> None:
    """A name for FedAvg and one server optimizer: the same bits as with the option."""
    chosen = {f"server_{name}": value for name, value in own.items()}
    named = end(federation, method, weights="examples", **own)
    assert torch.equal(named, end(federation, "fedavg", server_optimizer=optimizer, **chosen))


def test_fednova_with_equal_work_is_fedavg(federation: Federation) -> None:
    """One K for all: the same bits; with unequal K another model."""
    equal = federation.with_steps(3)
    assert torch.equal(end(equal, "fednova"), end(equal, "fedavg"))
    assert not torch.equal(end(federation, "fednova"), end(federation, "fedavg"))


def test_fednova_removes_the_tilt_of_unequal_work(conditioned: Federation) -> None:
    """All clients, small rate: FedNova ends nearer to the minimiser over examples than FedAvg does."""
    slow = dataclasses.replace(conditioned, settings=fl.LocalSettings(0.04))
    rounds = [Round(t) for t in range(80)]
    optimum = minimiser(slow, by_examples=True)
    far = {name: (end(slow, name, rounds) - optimum).norm() for name in ("fednova", "fedavg")}
    assert far["fednova"] < 0.2 * far["fedavg"]


def test_scaffold_of_single_full_steps_is_fedavg(federation: Federation) -> None:
    """K = 1, full batch, all clients: the corrections cancel in the mean."""
    federation, rounds = federation.with_steps(1), [Round(t) for t in range(6)]
    assert_close(end(federation, "scaffold", rounds), end(federation, "fedavg", rounds, weights="uniform"))


EXACT = [
    ("scaffold", {}),
    ("scaffold", {"option": "I"}),
    ("scaffold", {"objective": "examples"}),
    ("scaffold", {"server_optimizer": "momentum", "server_beta": 0.5, "eta_g": 0.5}),
    ("feddyn", {"alpha": 1}),
    ("feddyn", {"alpha": 1, "objective": "examples"}),
    ("feddyn", {"alpha": 1, "server_optimizer": "momentum", "server_beta": 0.3, "eta_g": 0.5}),
    ("mime", {"beta": 0.5}),
    ("mime", {"beta": 0.2, "damp": False}),
    ("mime", {"beta": 0.5, "weights": "examples"}),
]


@pytest.mark.parametrize(("name", "parameters"), slow_except(EXACT, EXACT[3]), ids=str)
def test_exact_minimiser_with_many_local_steps(conditioned: Federation, name: str, parameters: dict[str, Any]) -> None:
    """Constant rate, all clients, K = 6: the minimiser of the method's objective, whatever the server optimizer."""
    by_examples = "examples" in parameters.values()
    x = end(conditioned.with_steps(6), name, [Round(t) for t in range(100)], **parameters)
    torch.testing.assert_close(x, minimiser(conditioned, by_examples), rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", slow_except(["fedavg", "fedavgm", "fedcm", "mimelite"], "fedavg"))
def test_without_correction_it_stays_away(conditioned: Federation, name: str) -> None:
    """Constant rate, all clients, K = 6: what does not take the drift out ends elsewhere, so the law above can fail."""
    x = end(conditioned.with_steps(6), name, [Round(t) for t in range(100)], weights="uniform")
    assert (x - minimiser(conditioned)).norm() > 1e-3


def test_decay_after_mixing_is_stronger_by_the_local_share(conditioned: Federation) -> None:
    """FedCM, order = feddyn_code, K = 1: it stands still where sum p_i g_i + (wd / alpha) x = 0, not wd."""
    alpha, wd = 0.25, 0.1
    federation = dataclasses.replace(conditioned.with_steps(1), settings=fl.LocalSettings(0.4, weight_decay=wd))
    x = end(federation, "fedcm", [Round(t) for t in range(200)], alpha=alpha, order="feddyn_code")
    slope = sum(client.gradient(x) for client in federation.clients) / 3
    torch.testing.assert_close(slope, -wd / alpha * x, rtol=0, atol=1e-9)
