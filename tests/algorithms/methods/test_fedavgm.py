"""FedAvgM and SlowMo in numbers worked by hand: f(y) = (y - 4)^2 / 2, one client, K = 1, eta_l = 0.5, from x = 0."""

from __future__ import annotations

import torch

import algorithms as fl
from algorithms.conformance.federation import Federation, Round, everyone, flat, parabolas, path


def test_heavy_ball_by_hand() -> None:
    """beta = 0.5.  Round 0: delta 2, v = 2, x = 2.  Round 1: delta 1, v = 0.5 * 2 + 1 = 2, x = 4."""
    one = parabolas(a=(4.0, 1))
    fedavgm = fl.build("fedavgm", beta=0.5, variant="heavy_ball")
    assert path(one, fedavgm, everyone(one, 2), "v") == [(2.0, 2.0), (4.0, 2.0)]


def test_nesterov_by_hand() -> None:
    """beta = 0.5.  Round 0: delta 2, v = 2, x = 2 + 0.5 * 2 = 3.

    Round 1: delta 0.5, v = 0.5 * 2 + 0.5 = 1.5, x = 3 + 0.5 + 0.5 * 1.5 = 4.25.
    """
    one = parabolas(a=(4.0, 1))
    assert path(one, fl.build("fedavgm", beta=0.5), everyone(one, 2), "v") == [(3.0, 2.0), (4.25, 1.5)]


def test_momentum_units_by_hand() -> None:
    """The rate halves after round 0, where v = 2 and x = 2; the second delta is 0.25 * 2 = 0.5.

    In units of parameters v = 0.5 * 2 + 0.5 = 1.5; of a gradient v = 0.5 * (2 * 0.25 / 0.5) + 0.5 = 1.
    """
    one, rounds = parabolas(a=(4.0, 1)), [Round(0, [0], 0.5), Round(1, [0], 0.25, previous_rate=0.5)]
    ends = {
        units: path(one, fl.build("fedavgm", beta=0.5, variant="heavy_ball", momentum_units=units), rounds)[-1][0]
        for units in ("parameter", "gradient")
    }
    assert ends == {"parameter": 3.5, "gradient": 3.0}


def test_second_moments_change_with_the_square_of_the_rate_by_hand() -> None:
    """v = 4 and m = 2 after a delta of 4 with beta1 = 0.5, beta2 = 0.75, v_{-1} = 0; then the rate halves.

    m = 2 / 2, v = 4 / 4 and, with a delta of 0, m = 0.5 and v = 0.75.
    """
    adam = fl.build("fedadam", beta1=0.5, beta2=0.75, bias_correction=True, momentum_units="gradient")
    state, info = adam.init({"w": torch.zeros(1)}), fl.UpdateInfo("a", 1, 1)
    for t, (delta, rate, before) in enumerate([(4.0, 0.5, None), (0.0, 0.25, 0.5)]):
        round_info = fl.RoundInfo(t, rate, previous_learning_rate=before)
        state = fl.apply_updates(adam, state, [(info, {"w": torch.tensor([delta])})], round_info)
    assert (state.memory["m"]["w"].item(), state.memory["v"]["w"].item()) == (0.5, 0.75)


def test_slowmo_by_hand() -> None:
    """beta = 0.5, slow rate 0.5.  Round 0: delta 2, u = -2 / 0.5 = -4, x = 0.5 * 0.5 * 4 = 1.

    Round 1: delta 1.5, u = 0.5 * -4 - 3 = -5, x = 1 + 0.25 * 5 = 2.25.
    """
    one = parabolas(a=(4.0, 1))
    assert path(one, fl.build("slowmo", eta_g=0.5), everyone(one, 2), "u") == [(1.0, -4.0), (2.25, -5.0)]


def test_nesterov_is_fedmom(federation: Federation) -> None:
    """z+ = x + eta_g Dbar, x+ = z+ + beta (z+ - z), z_0 = x_0: the same path of x to 1e-12."""
    beta, eta_g = 0.8, 0.7
    fedavg, z, x = fl.build("fedavg"), flat(federation.x), federation.x
    for state in federation.play(fl.build("fedavgm", beta=beta, eta_g=eta_g), 6):
        Dbar = flat(
            fl.apply_updates(
                fedavg, fl.ServerState(x), federation.deltas(fedavg, fl.ServerState(x)), federation.round_info()
            ).x
        ) - flat(x)
        z_next = flat(x) + eta_g * Dbar
        ahead, z = z_next + beta * (z_next - z), z_next
        x = {"head": ahead[:2], "tail": ahead[2:].reshape(1, 1)}
        torch.testing.assert_close(state.x, x, rtol=0, atol=1e-12)
