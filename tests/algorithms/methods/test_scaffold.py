"""SCAFFOLD in numbers worked by hand, its variates, and the exact optimum in spite of what happens on the way."""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest
import torch

import algorithms as fl
from algorithms.conformance.federation import UNEVEN, Federation, Round, everyone, flat, parabolas, path, total
from tests.algorithms.optimum import minimiser
from tests.marks import slow_except

OBJECTIVES = ["uniform", "examples"]


def test_second_option_by_hand() -> None:
    """b = 4 in 1 step and b = -2 in 2 steps, eta_l = 0.5, from x = 0.

    Round 0: y = 2; y = -1, -1.5.  c_a = -2 / 0.5 = -4, c_b = 1.5 / (2 * 0.5) = 1.5, c = -1.25, x = 0.25.
    Round 1: a: d = -3.75 + 4 - 1.25 = -1, delta 0.5, c_a = -4 + 1.25 - 1 = -3.75.
             b: d = 2.25 - 2.75 = -0.5, y = 0.5; d = 2.5 - 2.75, delta 0.375, c_b = 1.5 + 1.25 - 0.375 = 2.375.
             c = (-3.75 + 2.375) / 2 = -0.6875, x = 0.25 + 0.4375 = 0.6875.
    """
    two = parabolas(a=(4.0, 1), b=(-2.0, 2))
    assert path(two, fl.build("scaffold"), everyone(two, 2), "c") == [(0.25, -1.25), (0.6875, -0.6875)]


def test_first_option_by_hand() -> None:
    """Variates are the gradients at x = 0, -4 and 2: c = -1 after round 0, which moves x as option II does.

    Round 1 at x = 0.25: the gradients are -3.75 and 2.25, so c = -0.75.
    a: d = -3.75 + 4 - 1 = -0.75, delta 0.375.  b: d = 2.25 - 2 - 1 = -0.75, y = 0.625; d = -0.375, delta 0.5625.
    """
    two = parabolas(a=(4.0, 1), b=(-2.0, 2))
    assert path(two, fl.build("scaffold", option="I"), everyone(two, 2), "c") == [(0.25, -1.0), (0.71875, -0.75)]


def test_an_absent_client_counts_in_the_mean_by_hand() -> None:
    """Only a of two clients: c = (1/2) * -4, for N = 2, while x moves by a's whole delta."""
    two = parabolas(a=(4.0, 1), b=(-2.0, 2))
    assert path(two, fl.build("scaffold"), [Round(0, [0])], "c") == [(2.0, -2.0)]


def test_second_option_sends_one_model_up() -> None:
    """The server makes the variates' change from the delta; option I needs it sent."""
    sent = {option: fl.build("scaffold", option=option).exchanges[0].payloads for option in ("I", "II")}
    assert sent == {"I": ("delta", "variate_change"), "II": ("delta",)}


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("option", ["I", "II"])
def test_c_is_the_mean_of_all_variates(federation: Federation, option: str, objective: fl.Objective) -> None:
    """At every commit, over all N clients, also those that sat out; weighted by omega_i where the objective is."""
    scaffold = fl.build("scaffold", option=option, objective=objective)
    for standing in federation.run(scaffold, UNEVEN):
        weighed = [
            fl.omega(objective, client.info, federation.round_info()) * flat(standing.clients[client.name]["c_i"])
            for client in federation.clients
        ]
        torch.testing.assert_close(flat(standing.server.memory["c"]), sum(weighed) / 3, rtol=0, atol=1e-12)


def test_variate_is_the_mean_gradient_that_the_client_saw(federation: Federation) -> None:
    """Option II, with decay inside the gradient: c_i+ = (1/K_i) sum_k g_{i,k}."""
    federation = dataclasses.replace(federation, settings=fl.LocalSettings(0.1, weight_decay=0.05))
    scaffold, client = fl.build("scaffold"), federation.clients[1]
    before, after = federation.run(scaffold, [Round(0), Round(1)])
    context = fl.ClientContext(before.server.memory["c"], before.clients["bob"])
    points = [flat(before.server.x)]
    federation.train(client, before.server.x, scaffold.client_rule(context), points.append)
    seen = [client.gradient(y) + 0.05 * y for y in points[:-1]]
    torch.testing.assert_close(flat(after.clients["bob"]["c_i"]), sum(seen) / client.steps, rtol=0, atol=1e-12)


def test_first_round_is_fedavgs(federation: Federation) -> None:
    """Zero variates: round 0 moves x as FedAvg with uniform weights does, to rounding."""
    scaffold, fedavg = fl.build("scaffold"), fl.build("fedavg", weights="uniform")
    torch.testing.assert_close(federation.play(scaffold, 1)[0].x, federation.play(fedavg, 1)[0].x, rtol=0, atol=1e-15)


def test_c_is_a_moving_average_of_the_pseudo_gradient(federation: Federation) -> None:
    """Option II: c_{t+1} = (1 - |S|/N) c_t + (|S|/N) G_t, with G_t from the deltas of the round."""
    scaffold, c = fl.build("scaffold"), torch.zeros(3, dtype=torch.float64)
    before = federation.start(scaffold)
    for round, after in zip(UNEVEN, federation.run(scaffold, UNEVEN), strict=True):
        answers = federation.answers(scaffold, before, {}, round).values()
        G = -total(flat(u.payloads["delta"]) / (u.steps * u.learning_rate) for _, u in answers) / len(round.cohort)
        share = len(round.cohort) / 3
        c, before = (1 - share) * c + share * G, after
        torch.testing.assert_close(flat(after.server.memory["c"]), c, rtol=0, atol=1e-12)


def test_with_all_clients_it_is_vrl_sgd_and_scaffnew(federation: Federation) -> None:
    """VRL-SGD: d = g - D_i, D_i += (xbar - y_i) / (K eta). Scaffnew: h_i += (1 / (K eta)) (xbar - yh_i), d = g - h_i.

    With one K and all clients both are D_i = c_i - c of SCAFFOLD II: x has the same path.
    """
    federation, eta = federation.with_steps(3), 0.1
    x, D = flat(federation.x), [torch.zeros(3, dtype=torch.float64)] * 3
    for state in federation.play(fl.build("scaffold"), 6):
        ends = []
        for client, D_i in zip(federation.clients, D, strict=True):
            y = x
            for _ in range(3):
                y = y - eta * (client.gradient(y) - D_i)
            ends.append(y)
        x = total(ends) / 3
        D = [D_i + (x - y) / (3 * eta) for D_i, y in zip(D, ends, strict=True)]
        torch.testing.assert_close(flat(state.x), x, rtol=0, atol=1e-12)


ACCIDENTS = [
    dataclasses.replace(round, clip={"bob": 0.4, "ada": 0.7} if 3 <= round.t < 9 else {})
    for round in (Round(t, ([0, 1], [1, 2], [2, 0], [1])[t % 4]) for t in range(130))
]
"""Changing cohorts; in six rounds two clients' deltas are admitted clipped."""


@pytest.mark.parametrize(
    ("option", "objective"), slow_except(product(("I", "II"), OBJECTIVES), ("I", "uniform"), ("II", "examples"))
)
def test_exact_optimum_in_spite_of_clips_and_abandoned_attempts(
    conditioned: Federation, option: str, objective: fl.Objective
) -> None:
    """Unequal K_i, changing cohorts, clipped deltas, an attempt that is abandoned: the exact minimiser."""
    scaffold = fl.build("scaffold", option=option, objective=objective)
    early = conditioned.run(scaffold, ACCIDENTS[:5])[-1]
    conditioned.answers(scaffold, early, {}, ACCIDENTS[5])
    end = conditioned.run(scaffold, ACCIDENTS[5:], early)[-1]
    optimum = minimiser(conditioned, by_examples=objective == "examples")
    torch.testing.assert_close(flat(end.server.x), optimum, rtol=0, atol=1e-9)


def test_a_state_of_what_never_counted_misses_the_optimum(conditioned: Federation) -> None:
    """The claim above can fail: a client that keeps the state of one abandoned attempt leaves x elsewhere for good."""
    scaffold = fl.build("scaffold")
    early = conditioned.run(scaffold, ACCIDENTS[:5])[-1]
    context, update = conditioned.answers(scaffold, early, {}, ACCIDENTS[5])["bob"]
    wrong = dataclasses.replace(early, clients={**early.clients, "bob": scaffold.next_client_state(context, update)})
    end = conditioned.run(scaffold, ACCIDENTS[5:], wrong)[-1]
    assert (flat(end.server.x) - minimiser(conditioned)).norm() > 1e-3


def test_what_is_missing_is_named(federation: Federation) -> None:
    """No population, no state, no variate: each is asked for by name."""
    scaffold = fl.build("scaffold")
    c = scaffold.init(federation.x).memory["c"]
    with pytest.raises(ValueError, match="this method needs population"):
        scaffold.sums([fl.UpdateInfo("a", 1, 1)], fl.RoundInfo(0, 0.1))
    with pytest.raises(fl.AlgorithmError, match="expected the client's state c_i, got none"):
        scaffold.client_rule(fl.ClientContext(c))
    with pytest.raises(fl.AlgorithmError, match="expected the control variate c in addition to the model, got none"):
        scaffold.client_rule(fl.ClientContext(None, scaffold.client_init(federation.x)))
