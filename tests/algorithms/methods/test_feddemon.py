"""FedDemon and FedDemonAdam in numbers worked by hand, and the ends of their decay."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch

import algorithms as fl
from algorithms.conformance.federation import Federation, Round, flat
from algorithms.methods.feddemon import decayed_momentum


def moved(name: str, deltas: Sequence[float], **parameters: object) -> list[float]:
    """x after each of some rounds of a run planned for four, with one client of known deltas, from 0."""
    method = fl.build(name, **parameters)
    state, seen = method.init({"w": torch.zeros(1, dtype=torch.float64)}), []
    for t, delta in enumerate(deltas):
        update = (fl.UpdateInfo("a", 1, 1), {"w": torch.tensor([delta], dtype=torch.float64)})
        state = fl.apply_updates(method, state, [update], fl.RoundInfo(t, 0.1, rounds=4))
        seen.append(state.x["w"].item())
    return seen


def test_decay_by_hand() -> None:
    """beta0 = 0.5, T = 4: with r = 1 - s/T = 3/4, 1/2, 1/4, 0 it is r / (1 + r) = 3/7, 1/3, 1/5, 0, and 0 after T."""
    betas = [decayed_momentum(0.5, fl.RoundInfo(t, 0.1, rounds=4)) for t in range(6)]
    assert betas == pytest.approx([3 / 7, 1 / 3, 1 / 5, 0, 0, 0])


def test_feddemon_by_hand() -> None:
    """Deltas of 3: v = 3, then 3/3 + 3 = 4, then 4/5 + 3 = 3.8, then 3: x = 3, 7, 10.8, 13.8."""
    assert moved("feddemon", [3.0] * 4, beta0=0.5) == pytest.approx([3.0, 7.0, 10.8, 13.8])


@pytest.mark.parametrize(("inside", "first"), [(True, 4 / 5), (False, 4 / 13)])
def test_feddemonadam_by_hand(inside: bool, first: float) -> None:
    """beta0 = 0.5, beta2 = 0.75, eta_g = 1, eps = 9, deltas of 4.

    Round 0: m = 4, v = 16 / 4 = 4, vhat = 4 / (1 - 0.75) = 16; x = 4 / sqrt(16 + 9), or 4 / (sqrt(16) + 9).
    Round 1: m = 4/3 + 4 = 16/3, v = 3 + 4 = 7, vhat = 7 / (1 - 0.75^2) = 16: 4/3 of the step before.
    """
    path = moved("feddemonadam", [4.0, 4.0], beta0=0.5, beta2=0.75, eta_g=1, eps=9, eps_inside=inside)
    assert path == pytest.approx([first, first + 4 / 3 * first])


def test_last_round_is_a_fedavg_round(federation: Federation) -> None:
    """beta_T = 0: for any v, the last planned round and later ones move x as FedAvg does from there."""
    states = federation.run(fl.build("feddemon"), [Round(t) for t in range(10)])
    for t in (7, 8, 9):
        before, after = states[t - 1].server, states[t].server
        plain = fl.apply_updates(
            fl.build("fedavg"), before, federation.deltas(fl.build("fedavg"), before), federation.round_info(t)
        )
        assert torch.equal(flat(after.x), flat(plain.x))


def test_long_run_begins_as_fedavgm(federation: Federation) -> None:
    """T -> infinity: beta_s stays beta0, the heavy ball of FedAvgM."""
    rounds = [Round(t) for t in range(5)]
    endless = dataclasses.replace(federation, planned=10**15)
    demon = endless.run(fl.build("feddemon", beta0=0.7), rounds)[-1].server
    heavy = federation.run(fl.build("fedavgm", beta=0.7, variant="heavy_ball"), rounds)[-1].server
    torch.testing.assert_close(demon.x, heavy.x, rtol=0, atol=1e-12)


def test_a_run_of_unknown_length_is_refused(federation: Federation) -> None:
    """Without T there is no decay."""
    feddemon = fl.build("feddemon")
    with pytest.raises(ValueError, match="this method needs rounds"):
        fl.apply_updates(
            feddemon,
            feddemon.init(federation.x),
            federation.deltas(feddemon, feddemon.init(federation.x)),
            fl.RoundInfo(0, 0.1),
        )
