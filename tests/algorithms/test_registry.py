"""Building by name: defaults, conversions and refusals."""

from __future__ import annotations

from itertools import product
from typing import Annotated, Any

import pytest
import torch

import algorithms as fl
from algorithms.conformance.federation import Federation
from algorithms.parameters import Range, declared, read_parameters
from algorithms.registry import OPTIMIZERS
from tests.marks import slow_except

OF_FEDCM = "Available: alpha, eta_g, gradient, normaliser, order, server_optimizer, weights."
OPTIONS = {
    "server_optimizer": "sgd",
    "eta_g": 1.0,
    "gradient": "plain",
    "normaliser": "none",
    "order": "paper",
}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "fedavg": {"weights": "examples"},
    "fedcm": {"alpha": 0.1, "weights": "uniform"},
    "feddyn": {"alpha": 0.1, "objective": "uniform"},
    "fedprox": {"mu": 0.01, "weights": "examples"},
    "fedrobust": {"eta_2": 0.01, "lam": 1.0, "L": "diagonal", "weights": "uniform"},
    "mfl": {"gamma": 0.9, "weights": "examples"},
    "mime": {"beta": 0.9, "damp": True, "weights": "uniform"},
    "mimelite": {"beta": 0.9, "damp": True, "weights": "uniform"},
    "proxskip": {"p": 0.1},
    "qg": {"beta": 0.9, "mu": 0.9, "weights": "uniform"},
    "scaffold": {"option": "II", "objective": "uniform"},
}
FIXED: dict[str, dict[str, Any]] = {
    "fednova": {"weights": "examples", **OPTIONS},
    "fedsam": {"weights": "uniform", **OPTIONS, "rho": 0.1, "sam_p": 2.0, "sam_scope": "model"},
    "mofedsam": {"beta": 0.1, "weights": "uniform", **OPTIONS, "rho": 0.1, "sam_p": 2.0, "sam_scope": "model"},
}
del FIXED["fednova"]["normaliser"], FIXED["fedsam"]["gradient"], FIXED["mofedsam"]["gradient"]
ADAPTIVE = {"tau": 1e-3, "eta_g": 0.1, "v_from": "delta"}
OPTIMIZED: dict[str, dict[str, Any]] = {
    "fedavgm": {"variant": "nesterov", "weights": "examples", "beta": 0.9, "eta_g": 1.0},
    "fedadagrad": {"weights": "examples", "beta1": 0.0, **ADAPTIVE},
    "fedyogi": {"weights": "examples", "beta1": 0.9, "beta2": 0.99, **ADAPTIVE, "bias_correction": False},
    "fedadam": {"weights": "examples", "beta1": 0.9, "beta2": 0.99, **ADAPTIVE, "bias_correction": False},
    "feddemon": {"weights": "examples", "beta0": 0.9, "eta_g": 1.0},
    "feddemonadam": {
        "weights": "examples",
        "beta0": 0.9,
        "beta2": 0.999,
        "eta_g": 0.01,
        "eps": 1e-8,
        "eps_inside": True,
    },
}
CHOSEN = {"gradient": "plain", "normaliser": "none", "order": "paper"}
DEFAULTS: dict[str, dict[str, Any]] = {
    **{name: {**own, **OPTIONS} for name, own in CORRECTIONS.items()},
    **FIXED,
    **{name: {**own, "momentum_units": "parameter", **CHOSEN} for name, own in OPTIMIZED.items()},
    "slowmo": {"weights": "uniform", "beta": 0.5, "eta_g": 1.0, **CHOSEN},
    "diloco": {"weights": "uniform", "beta": 0.9, "eta_g": 0.7, "momentum_units": "parameter", **CHOSEN},
}


def test_every_method_builds_with_its_defaults() -> None:
    """All names build and list every parameter with its value, which the results record."""
    assert {name: dict(fl.build(name).parameters) for name in fl.names()} == DEFAULTS


def test_chosen_parts_bring_their_parameters() -> None:
    """A server optimizer's parameters are prefixed except eta_g; SAM has its radius."""
    built = fl.build("mimelite", server_optimizer="adam", server_tau=0.01, gradient="sam", rho=0.2)
    assert built.parameters == {
        "beta": 0.9,
        "damp": True,
        "weights": "uniform",
        "server_optimizer": "adam",
        "server_beta1": 0.9,
        "server_beta2": 0.99,
        "server_tau": 0.01,
        "eta_g": 0.1,
        "server_v_from": "delta",
        "server_bias_correction": False,
        "momentum_units": "parameter",
        "gradient": "sam",
        "rho": 0.2,
        "sam_p": 2.0,
        "sam_scope": "model",
        "normaliser": "none",
        "order": "paper",
    }


def test_memory_of_a_chosen_optimizer_is_prefixed() -> None:
    """MimeLite keeps an m, and so does Adam: a checkpoint has both under different names."""
    state = fl.build("mimelite", server_optimizer="adam").init({"w": torch.zeros(1)})
    assert list(state.memory) == ["m", "server_m", "server_v"]


COMBINATIONS = list(product([*CORRECTIONS, "fednova"], ["plain", "sam"], OPTIMIZERS))
PAIRS = [parts for parts in COMBINATIONS if parts[0] == "fedcm" or parts[2] == "adam"]
"""FedCM with every optimizer, and every correction with Adam, each along both gradients."""


@pytest.mark.parametrize(("name", "gradient", "optimizer"), slow_except(COMBINATIONS, *PAIRS))
def test_every_correction_goes_with_every_optimizer_and_gradient(
    federation: Federation, name: str, optimizer: str, gradient: str
) -> None:
    """All combinations but Mime with SAM run a round to a finite model that has moved."""
    if (name, gradient) == ("mime", "sam"):
        pytest.skip("refused, see test_parts_that_do_not_go_together_are_refused")
    algorithm = fl.build(name, server_optimizer=optimizer, gradient=gradient)
    [state] = federation.play(algorithm, 1)
    assert all(torch.isfinite(tensor).all() for tensor in state.x.values())
    assert not torch.equal(state.x["head"], federation.x["head"])


@pytest.mark.parametrize(
    ("name", "parameters", "reason"),
    [
        ("mime", {"gradient": "sam"}, "would need an ascent of its own"),
        ("feddyn", {"normaliser": "fednova"}, "must use the same sum of deltas"),
        ("mfl", {"normaliser": "fednova"}, "the momentum that its training started with"),
    ],
)
def test_parts_that_do_not_go_together_are_refused(name: str, parameters: dict[str, Any], reason: str) -> None:
    """They are refused before the run, with the reason."""
    with pytest.raises(fl.AlgorithmError, match=f"cannot be combined with it: .*{reason}"):
        fl.build(name, **parameters)


def test_parameters_of_a_built_method_build_it_again() -> None:
    """The parameters sent to clients are enough to build the same method."""
    first = fl.build("fedcm", alpha=1, eta_g=0.5)
    again = fl.build(first.name, **first.parameters)
    assert (again.name, again.parameters) == ("fedcm", {**DEFAULTS["fedcm"], "alpha": 1.0, "eta_g": 0.5})


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        (
            "fedcm",
            {"alhpa": 0.1},
            f"unknown parameter of fedcm: 'alhpa'. Did you mean 'alpha'? {OF_FEDCM}",
        ),
        (
            "fedadam",
            {"server_optimizer": "sgd"},
            (
                "unknown parameter of fedadam: 'server_optimizer'. Available: beta1, beta2, bias_correction, eta_g, "
                "gradient, momentum_units, normaliser, order, tau, v0, v_from, weights."
            ),
        ),
        (
            "fedcm",
            {"rho": 0.1},
            f"unknown parameter of fedcm: 'rho'. {OF_FEDCM}",
        ),
        ("fedavgm", {"beta": 1}, "fedavgm, parameter 'beta': expected a number at least 0 and below 1; got 1"),
        ("mime", {"damp": 1}, "mime, parameter 'damp': expected true or false; got 1"),
        ("fedrobust", {"eta_2": 0.6}, "fedrobust: expected eta_2 < 1 / (2 lam) = 0.5, got 0.6"),
        ("fedcm", {"alpha": 0}, "fedcm, parameter 'alpha': expected a number over 0 and at most 1; got 0"),
        ("fedcm", {"alpha": 1.5}, "fedcm, parameter 'alpha': expected a number over 0 and at most 1; got 1.5"),
        ("fedavg", {"eta_g": "1"}, "fedavg, parameter 'eta_g': expected a number over 0; got '1'"),
        ("fedavg", {"eta_g": True}, "fedavg, parameter 'eta_g': expected a number over 0; got True"),
        ("fedavg", {"eta_g": float("inf")}, "fedavg, parameter 'eta_g': expected a number over 0; got inf"),
        ("fedavg", {"eta_g": float("nan")}, "fedavg, parameter 'eta_g': expected a number over 0; got nan"),
        ("fedavg", {"weights": "size"}, "fedavg, parameter 'weights': expected one of uniform, examples; got 'size'"),
    ],
)
def test_an_unknown_value_is_named(name: str, parameters: dict[str, Any], message: str) -> None:
    """The error has the expected value, the actual value and the available names."""
    with pytest.raises(fl.AlgorithmError) as caught:
        fl.build(name, **parameters)
    assert str(caught.value) == message


@pytest.mark.parametrize(("name", "hint"), [("fedcn", " Did you mean 'fedcm'?"), ("quux", "")])
def test_an_unknown_method_is_named_with_the_known_ones(name: str, hint: str) -> None:
    """Those of this package are among them; other tests of the process may have added others."""
    with pytest.raises(fl.AlgorithmError) as caught:
        fl.build(name)
    start, _, known = str(caught.value).partition(" Available: ")
    assert start == f"unknown algorithm: {name!r}.{hint}"
    assert set(fl.names()) <= set(known.removesuffix(".").split(", "))


def test_whole_numbers_may_come_as_floats() -> None:
    """A wire format without integers sends 5.0 for 5; 5.5 is not a whole number."""

    def method(rounds: Annotated[int, Range(over=0)] = 1) -> None:
        """Never called."""

    assert repr(read_parameters("method", declared(method), {"rounds": 5.0})) == "{'rounds': 5}"
    with pytest.raises(fl.AlgorithmError, match=r"expected a whole number over 0; got 5.5"):
        read_parameters("method", declared(method), {"rounds": 5.5})


def test_no_number_is_too_large_to_be_refused() -> None:
    """An integer beyond every float is out of range, not an overflow."""
    with pytest.raises(fl.AlgorithmError, match="expected a number over 0"):
        fl.build("fedavg", eta_g=10**400)
