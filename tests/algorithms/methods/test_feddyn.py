"""FedDyn in numbers worked by hand, its duals, and the exact optimum in spite of what happens on the way."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import algorithms as fl
from algorithms.conformance.federation import UNEVEN, Federation, Round, everyone, flat, parabolas, path, total
from tests.algorithms.optimum import minimiser
from tests.marks import slow_except

OBJECTIVES = ["uniform", "examples"]


def test_two_rounds_by_hand() -> None:
    """f(y) = (y - 4)^2 / 2, one client, alpha = 1, K = 1, eta_l = 0.5, from x = 0.

    Round 0: d = -4, y = 2, h_i = h = -2, x = 2 + 2 = 4.
    Round 1: d = 0 + 2 + 0, y = 3, h_i = h = -2 + 1 = -1, x = 3 + 1 = 4.
    """
    one = parabolas(a=(4.0, 1))
    assert path(one, fl.build("feddyn", alpha=1), everyone(one, 2), "h") == [(4.0, -2.0), (4.0, -1.0)]


def test_proximal_term_by_hand() -> None:
    """K = 2, alpha = 1: d = -4, y = 2; then d = -2 + 1 * (2 - 0) = 0, so y = 2 and x = 2 + 2."""
    one = parabolas(a=(4.0, 2))
    assert path(one, fl.build("feddyn", alpha=1), everyone(one, 1), "h") == [(4.0, -2.0)]


def test_an_absent_client_counts_in_the_mean_by_hand() -> None:
    """Only a of two clients: h = -(1/2) * 2 = -1, for N = 2, and x = 2 + 1."""
    two = parabolas(a=(4.0, 1), b=(-2.0, 1))
    assert path(two, fl.build("feddyn", alpha=1), [Round(0, [0])], "h") == [(3.0, -1.0)]


def test_weight_of_a_client_by_hand() -> None:
    """omega = 2 halves alpha = 1, K = 2: d = -4, y = 2; d = -2 + 0.5 * 2 = -1, y = 2.5; h_i = -0.5 * 2.5 = -1.25."""
    one, feddyn = parabolas(a=(4.0, 2)), fl.build("feddyn", alpha=1, objective="examples")
    context = fl.ClientContext(None, feddyn.client_init(one.x), omega=2.0)
    update = fl.answer(one.model(one.x), one.clients[0].data(one.x["head"]), fl.Work(feddyn, context, one.settings))
    assert flat(update.payloads["delta"])[0].item() == 2.5
    assert flat(feddyn.next_client_state(context, update)["h_i"])[0].item() == -1.25


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_h_is_the_mean_of_all_duals(federation: Federation, objective: fl.Objective) -> None:
    """At every commit, over all N clients, also those that sat out; weighted by omega_i where the objective is."""
    feddyn = fl.build("feddyn", alpha=0.5, objective=objective)
    for standing in federation.run(feddyn, UNEVEN):
        weighed = [
            fl.omega(objective, client.info, federation.round_info()) * flat(standing.clients[client.name]["h_i"])
            for client in federation.clients
        ]
        torch.testing.assert_close(flat(standing.server.memory["h"]), sum(weighed) / 3, rtol=0, atol=1e-12)


def test_it_is_the_program_of_the_authors(federation: Federation) -> None:
    """b_i += delta_i, x = mean_S y_i + (1/N) sum_all b_i, d = g + alpha (y - x + b_i): the same path to 1e-12."""
    alpha, x = 0.5, flat(federation.x)
    b = {client.name: torch.zeros(3, dtype=torch.float64) for client in federation.clients}
    for round, standing in zip(UNEVEN, federation.run(fl.build("feddyn", alpha=alpha), UNEVEN), strict=True):
        ends = []
        for client in (federation.clients[i] for i in round.cohort):
            y = x
            for _ in range(client.steps):
                y = y - federation.info(round).learning_rate * (client.gradient(y) + alpha * (y - x + b[client.name]))
            b[client.name] = b[client.name] + y - x
            ends.append(y)
        x = total(ends) / len(ends) + total(b.values()) / 3
        torch.testing.assert_close(flat(standing.server.x), x, rtol=0, atol=1e-12)


def test_with_all_clients_it_is_fedpd(federation: Federation) -> None:
    """FedPD with s = 1/alpha: d = g + lam_i + (y - a)/s, lam_i += (y - a)/s, a = mean (y_i + s lam_i)."""
    s, a = 2.0, flat(federation.x)
    lam = [torch.zeros(3, dtype=torch.float64)] * 3
    for state in federation.play(fl.build("feddyn", alpha=1 / s), 6):
        ends = []
        for client, lam_i in zip(federation.clients, lam, strict=True):
            y = a
            for _ in range(client.steps):
                y = y - 0.1 * (client.gradient(y) + lam_i + (y - a) / s)
            ends.append(y)
        lam = [lam_i + (y - a) / s for lam_i, y in zip(lam, ends, strict=True)]
        a = total(y + s * lam_i for y, lam_i in zip(ends, lam, strict=True)) / 3
        torch.testing.assert_close(flat(state.x), a, rtol=0, atol=1e-12)


ACCIDENTS = [
    dataclasses.replace(round, clip={"bob": 0.4, "ada": 0.7} if 3 <= round.t < 9 else {})
    for round in (Round(t, ([0, 1], [1, 2], [2, 0], [0, 1, 2])[t % 4]) for t in range(130))
]
"""Changing cohorts; in six rounds two clients' deltas are admitted clipped."""


@pytest.mark.parametrize("objective", slow_except(OBJECTIVES, "examples"))
def test_exact_optimum_in_spite_of_clips_and_abandoned_attempts(
    conditioned: Federation, objective: fl.Objective
) -> None:
    """Changing cohorts, clipped deltas, an attempt that is abandoned: the exact minimiser."""
    federation, feddyn = conditioned.with_steps(8), fl.build("feddyn", alpha=1, objective=objective)
    early = federation.run(feddyn, ACCIDENTS[:5])[-1]
    federation.answers(feddyn, early, {}, ACCIDENTS[5])
    end = federation.run(feddyn, ACCIDENTS[5:], early)[-1]
    optimum = minimiser(federation, by_examples=objective == "examples")
    torch.testing.assert_close(flat(end.server.x), optimum, rtol=0, atol=1e-9)


@pytest.mark.slow  # that the claim above can fail
def test_a_state_that_does_not_know_of_a_clip_misses_the_optimum(conditioned: Federation) -> None:
    """The claim above can fail: a client that made its dual from the delta it sent leaves x elsewhere for good."""
    federation, feddyn = conditioned.with_steps(8), fl.build("feddyn", alpha=1)
    before = federation.run(feddyn, ACCIDENTS[:4])[-1]
    context, update = federation.answers(feddyn, before, {}, ACCIDENTS[4])["ada"]
    after = federation.after(feddyn, before, ACCIDENTS[4])
    wrong = dataclasses.replace(after, clients={**after.clients, "ada": feddyn.next_client_state(context, update)})
    end = federation.run(feddyn, ACCIDENTS[9:], wrong)[-1]
    assert (flat(end.server.x) - minimiser(federation)).norm() > 1e-3
