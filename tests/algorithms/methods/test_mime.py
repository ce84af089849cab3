"""Mime and MimeLite in numbers worked by hand: f(y) = (y - 4)^2 / 2, one client, K = 2, eta_l = 0.5, beta = 0.5."""

from __future__ import annotations

import dataclasses

import torch

import algorithms as fl
from algorithms.conformance.federation import UNEVEN, Federation, everyone, flat, parabolas, path, total


def test_mimelite_by_hand() -> None:
    """Round 0: m = 0, d = -2, y = 1; d = -1.5, y = 1.75.  cbar = -4, m = -2.

    Round 1: d = 0.5 * -2.25 - 1 = -2.125, y = 2.8125; d = 0.5 * -1.1875 - 1, y = 3.609375.  m = -1.125 - 1.
    """
    one = parabolas(a=(4.0, 2))
    assert path(one, fl.build("mimelite", beta=0.5), everyone(one, 2), "m") == [(1.75, -2.0), (3.609375, -2.125)]


def test_undamped_mimelite_by_hand() -> None:
    """Without the factors 1 - beta: d = -4, y = 2; d = -2, y = 3; m = cbar = -4."""
    one = parabolas(a=(4.0, 2))
    assert path(one, fl.build("mimelite", beta=0.5, damp=False), everyone(one, 1), "m") == [(3.0, -4.0)]


def test_mime_by_hand() -> None:
    """Exchange 1: cbar = -4, so m_1 = -2 is sent.  d = 0.5 * (-4 + 4) - 2, y = 1; d = 0.5 * (-3 + 4) - 2, y = 1.75.

    Round 1: cbar = -2.25, m = -1.125 - 1 = -2.125; d = m, y = 2.8125; g - g(x) = 1.0625, d = -1.59375, y = 3.609375.
    """
    one = parabolas(a=(4.0, 2))
    assert path(one, fl.build("mime", beta=0.5), everyone(one, 2), "m") == [(1.75, -2.0), (3.609375, -2.125)]


def test_mime_corrects_each_client_by_hand() -> None:
    """b = 4 and b = 0, K = 2, beta = 0: cbar = -2 for both.

    Each: d = -2, y = 1; g(y) - g(x) = 1, d = -1, y = 1.5: the clients agree, where FedAvg's would be at 3 and 0.
    """
    two = parabolas(a=(4.0, 2), b=(0.0, 2))
    assert path(two, fl.build("mime", beta=0), everyone(two, 1)) == [(1.5,)]


def test_mime_has_two_exchanges_and_mimelite_one() -> None:
    """Mime: x down, gradients up, momentum down, deltas up. MimeLite sends both up at once."""
    assert [exchange.payloads for exchange in fl.build("mime").exchanges] == [("full_gradient",), ("delta",)]
    assert [exchange.payloads for exchange in fl.build("mimelite").exchanges] == [("delta", "full_gradient")]


def test_first_exchange_sends_x_alone_and_trains_nothing(federation: Federation) -> None:
    """What Mime's clients need for a full gradient is the model; they report no buffers and no loss."""
    mime = fl.build("mime")
    start = federation.start(mime)
    assert mime.direction(start.server) is None
    [(_, update), *_] = federation.answers(mime, start, {}, UNEVEN[0]).values()
    assert (update.loss, update.buffers, list(update.payloads)) == (None, {}, ["full_gradient"])


def test_single_full_steps_are_those_of_fedcm(federation: Federation) -> None:
    """K = 1, full batch: Mime, MimeLite and FedCM with alpha = 1 - beta move x alike; MimeLite's m is FedCM's Delta."""
    federation = federation.with_steps(1)
    mime, lite = (federation.run(fl.build(name, beta=0.6), UNEVEN)[-1].server for name in ("mime", "mimelite"))
    fedcm = federation.run(fl.build("fedcm", alpha=0.4), UNEVEN)[-1].server
    torch.testing.assert_close(mime.x, fedcm.x, rtol=0, atol=1e-12)
    torch.testing.assert_close(lite.x, fedcm.x, rtol=0, atol=1e-12)
    torch.testing.assert_close(lite.memory["m"], fedcm.memory["Delta"], rtol=0, atol=1e-12)


def test_without_momentum_mime_is_feddane(federation: Federation) -> None:
    """beta = 0: d = g(y) - g(x) + cbar from closed forms; unequal K_i, changing cohorts, a decaying rate."""
    x = flat(federation.x)
    for round, standing in zip(UNEVEN, federation.run(fl.build("mime", beta=0), UNEVEN), strict=True):
        cohort = [federation.clients[i] for i in round.cohort]
        cbar, ends = total(client.gradient(x) for client in cohort) / len(cohort), []
        for client in cohort:
            y = x
            for _ in range(client.steps):
                y = y - federation.info(round).learning_rate * (client.gradient(y) - client.gradient(x) + cbar)
            ends.append(y)
        x = total(ends) / len(ends)
        torch.testing.assert_close(flat(standing.server.x), x, rtol=0, atol=1e-12)


def test_full_gradient_contains_decay(federation: Federation) -> None:
    """Decay is inside g: m after a round of K = 1 is FedCM's Delta with decay too."""
    federation = dataclasses.replace(federation.with_steps(1), settings=fl.LocalSettings(0.1, weight_decay=0.3))
    lite = federation.run(fl.build("mimelite", beta=0.6), UNEVEN)[-1].server
    fedcm = federation.run(fl.build("fedcm", alpha=0.4), UNEVEN)[-1].server
    torch.testing.assert_close(lite.memory["m"], fedcm.memory["Delta"], rtol=0, atol=1e-12)
