"""FedAdagrad, FedYogi and FedAdam in numbers worked by hand: from x = 1, with eta_g = 2."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import algorithms as fl


def moved(name: str, deltas: Sequence[float], **parameters: object) -> list[float]:
    """x after each of some rounds with one client of known deltas."""
    method = fl.build(name, eta_g=2.0, **parameters)
    state, seen = method.init({"w": torch.tensor([1.0], dtype=torch.float64)}), []
    for t, delta in enumerate(deltas):
        update = (fl.UpdateInfo("a", 1, 1), {"w": torch.tensor([delta], dtype=torch.float64)})
        state = fl.apply_updates(method, state, [update], fl.RoundInfo(t, 0.1))
        seen.append(state.x["w"].item())
    return seen


def test_adam_by_hand() -> None:
    """beta1 = beta2 = 0.5, tau = 2, so v starts at 4.

    Delta 2: m = 1, v = (4 + 4) / 2 = 4, x = 1 + 2 * 1 / (2 + 2) = 1.5.
    Delta 14: m = 7.5, v = (4 + 196) / 2 = 100, x = 1.5 + 2 * 7.5 / (10 + 2) = 2.75.
    """
    assert moved("fedadam", [2.0, 14.0], beta1=0.5, beta2=0.5, tau=2.0) == [1.5, 2.75]


def test_yogi_by_hand() -> None:
    """beta1 = beta2 = 0.5, tau = 2, so v starts at 4.

    Delta 2: u = v, and sign(0) = 0: v = 4, x = 1 + 2 * 1 / 4 = 1.5.
    Delta 8: m = 4.5, v = 4 + 64 / 2 = 36, x = 1.5 + 2 * 4.5 / (6 + 2) = 2.625.
    """
    assert moved("fedyogi", [2.0, 8.0], beta1=0.5, beta2=0.5, tau=2.0) == [1.5, 2.625]


def test_adagrad_by_hand() -> None:
    """tau = 3, so v starts at 9.  Delta 4: v = 25, x = 1 + 2 * 4 / 8 = 2.  Delta 12: v = 169, x = 2 + 2 * 12 / 16."""
    assert moved("fedadagrad", [4.0, 12.0], tau=3.0) == [2.0, 3.5]


@pytest.mark.parametrize("name", ["fedadam", "fedyogi"])
def test_bias_correction_by_hand(name: str) -> None:
    """beta1 = 0.5, beta2 = 0.75, tau = 2, v from 0, delta 4: m = 2, v = 4, rate 2 * sqrt(0.25) / 0.5 = 2.

    x = 1 + 2 * 2 / (2 + 2) = 2, tau added outside the root and not scaled.
    """
    assert moved(name, [4.0], beta1=0.5, beta2=0.75, tau=2.0, bias_correction=True) == [2.0]


def test_bias_correction_counts_rounds_from_one() -> None:
    """Equal deltas of 3, tau small: corrected, every step is eta_g * 3 / 3 whatever the betas."""
    steps = torch.tensor([1.0, *moved("fedadam", [3.0] * 4, tau=1e-9, bias_correction=True)]).diff()
    assert steps.tolist() == pytest.approx([2.0] * 4)


def test_second_moment_may_come_from_the_first_by_hand() -> None:
    """v_from = m, beta1 = beta2 = 0.5, tau = 2, delta 4: m = 2, v = (4 + 2^2) / 2 = 4, x = 1 + 2 * 2 / 4 = 2."""
    assert moved("fedadam", [4.0], beta1=0.5, beta2=0.5, tau=2.0, v_from="m") == [2.0]


def test_without_memory_a_step_is_the_normalised_delta() -> None:
    """beta1 = beta2 = 0: eta_g * Dbar / (|Dbar| + tau) = 2 * 3 / (3 + 1)."""
    assert moved("fedadam", [3.0], beta1=0, beta2=0, tau=1.0) == [2.5]


@pytest.mark.parametrize("name", ["fedadagrad", "fedyogi", "fedadam"])
def test_initial_second_moment(name: str) -> None:
    """v_{-1} = v0 in every entry; without it tau^2, whose bits v0 = tau^2 gives too."""
    x = {"w": torch.zeros(2, dtype=torch.float64)}
    assert fl.build(name, v0=0.25).init(x).memory["v"]["w"].tolist() == [0.25, 0.25]
    assert fl.build(name, v0=0).init(x).memory["v"]["w"].tolist() == [0.0, 0.0]
    assert fl.build(name).init(x).memory["v"]["w"].tolist() == [1e-3**2] * 2
    deltas = [0.3, -0.2, 0.7]
    assert moved(name, deltas, tau=0.07) == moved(name, deltas, tau=0.07, v0=0.07**2)


def test_initial_second_moment_by_hand() -> None:
    """Adam, beta1 = beta2 = 0.5, tau = 2, v0 = 12, delta 2: m = 1, v = (12 + 4) / 2 = 8, x = 1 + 2 / (sqrt(8) + 2)."""
    assert moved("fedadam", [2.0], beta1=0.5, beta2=0.5, tau=2.0, v0=12.0) == [1 + 2 / (8**0.5 + 2)]


def test_initial_second_moment_is_a_parameter_only_if_given() -> None:
    """So results and assignments of runs without it are as they were."""
    assert "v0" not in fl.build("fedadam").parameters
    assert fl.build("fedadam", v0=1).parameters["v0"] == 1.0
    assert fl.build("fedcm", server_optimizer="yogi", server_v0=1e-6).init({"w": torch.zeros(1)}).memory["server_v"][
        "w"
    ].item() == pytest.approx(1e-6)
    with pytest.raises(fl.AlgorithmError, match="parameter 'v0': expected a number at least 0; got -1"):
        fl.build("fedadam", v0=-1)
