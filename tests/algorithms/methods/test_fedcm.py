"""FedCM in numbers worked by hand, and lemma 4.1."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import algorithms as fl
from algorithms.conformance.federation import Federation, flat
from algorithms.optimizers.spec import RateSchedule


def test_two_rounds_by_hand() -> None:
    """f(y) = (y - 4)^2 / 2, one client, K = 1, eta_l = 0.5, alpha = 0.25, from x = 0.

    Round 0: g = -4, d = 0.25 * -4 = -1, delta = 0.5; x = 0.5, Delta = -0.5 / 0.5 = -1.
    Round 1: g = -3.5, d = 0.25 * -3.5 + 0.75 * -1 = -1.625, delta = 0.8125; x = 1.3125, Delta = -1.625.
    """
    fedcm = fl.build("fedcm", alpha=0.25)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    state = fedcm.init(fl.read_state(model).trainable)
    batch = (torch.tensor([[1.0]]), torch.tensor([[4.0]]))
    seen = []
    for t in range(2):
        fl.load_state(model, fl.ModelState(state.x, {}, {}))
        rule = fedcm.local_rule(fedcm.direction(state))
        result = fl.train_locally(
            model, [batch], lambda y, b: 0.5 * (y - b).square().mean(), rule, fl.LocalSettings(0.5)
        )
        state = fl.apply_updates(fedcm, state, [(fl.UpdateInfo("a", 1, 1), result.delta)], fl.RoundInfo(t, 0.5))
        seen.append((state.x["weight"].item(), state.memory["Delta"]["weight"].item()))
    assert seen == [(0.5, -1.0), (1.3125, -1.625)]


def test_each_delta_is_divided_by_its_own_steps_by_hand() -> None:
    """Deltas 2 in 4 steps and -3 in 1 step, eta_l = 0.5, uniform weights, eta_g = 2, x = 1.

    Delta = -(1/2) * (2 / (0.5 * 4) + -3 / (0.5 * 1)) = -(1 - 6) / 2 = 2.5; x = 1 + 2 * (2 - 3) / 2 = 0.
    """
    fedcm = fl.build("fedcm", eta_g=2.0)
    updates = [
        (fl.UpdateInfo("a", num_examples=5, num_steps=4), {"w": torch.tensor([2.0])}),
        (fl.UpdateInfo("b", num_examples=1, num_steps=1), {"w": torch.tensor([-3.0])}),
    ]
    state = fl.apply_updates(fedcm, fedcm.init({"w": torch.tensor([1.0])}), updates, fl.RoundInfo(0, 0.5))
    assert (state.x["w"].item(), state.memory["Delta"]["w"].item()) == (0.0, 2.5)


@pytest.mark.parametrize("weights", ["uniform", "examples"])
@pytest.mark.parametrize("alpha", [0.1, 0.6])
def test_momentum_is_the_moving_average_of_gradients(federation: Federation, alpha: float, weights: str) -> None:
    """Lemma 4.1 to 1e-12 with unequal K_i, decaying rate, weight decay inside the gradient and changing cohorts.

    Delta_{t+1} = (1 - alpha) Delta_t + alpha gbar_t unrolls to the lemma's sum. gbar_t is made here from the closed
    form A^T (A y - b) / n + wd * y at the points that the clients went through.
    """
    wd = 0.05
    fedcm = fl.build("fedcm", alpha=alpha, weights=weights, eta_g=0.8)
    state, average = fedcm.init(federation.x), torch.zeros(3, dtype=torch.float64)
    for t, cohort in enumerate(([0, 1, 2], [1], [0, 2], [2, 1], [0, 1, 2])):
        rate = 0.2 * 0.7**t
        now = dataclasses.replace(federation, settings=fl.LocalSettings(rate, weight_decay=wd))
        rule = fedcm.local_rule(fedcm.direction(state))
        updates, seen = [], []
        for client in (federation.clients[i] for i in cohort):
            points = [torch.cat([tensor.flatten() for tensor in state.x.values()])]
            updates.append((client.info, now.train(client, state.x, rule, points.append).delta))
            seen.append(sum(client.gradient(y) + wd * y for y in points[:-1]) / client.steps)
        p = fedcm.weights([info for info, _ in updates])
        gbar = sum(p_i * g for p_i, g in zip(p, seen, strict=True))
        average = (1 - alpha) * average + alpha * gbar
        state = fl.apply_updates(fedcm, state, updates, fl.RoundInfo(t, rate))
        Delta = torch.cat([tensor.flatten() for tensor in state.memory["Delta"].values()])
        torch.testing.assert_close(Delta, average, rtol=0, atol=1e-12)


def test_with_a_schedule_the_momentum_is_the_mean_gradient_weighted_by_the_rates(federation: Federation) -> None:
    """Delta_1 = alpha * sum_i p_i (sum_k eta_k g_k) / (sum_k eta_k), with each client's own K_i and rates."""
    schedule, alpha = RateSchedule("cosine", warmup=0.3, end=0.1), 0.3
    now = dataclasses.replace(federation, settings=fl.LocalSettings(0.2, schedule=schedule))
    fedcm = fl.build("fedcm", alpha=alpha)
    state, updates, means = fedcm.init(federation.x), [], []
    rule = fedcm.local_rule(fedcm.direction(state))
    for client in federation.clients:
        points = [torch.cat([tensor.flatten() for tensor in state.x.values()])]
        updates.append((client.info, now.train(client, state.x, rule, points.append).delta))
        rates = [0.2 * schedule.factor(step, client.steps) for step in range(client.steps)]
        weighted = sum(rate * client.gradient(y) for rate, y in zip(rates, points[:-1], strict=True))
        means.append(weighted / sum(rates))
    assert len({client.steps for client in federation.clients}) > 1
    state = fl.apply_updates(fedcm, state, updates, fl.RoundInfo(0, 0.2, schedule=schedule))
    expected = alpha * sum(means) / len(means)
    torch.testing.assert_close(flat(state.memory["Delta"]), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("order", ["paper", "feddyn_code"])
def test_the_effective_decay_is_that_of_the_stationary_point(order: str) -> None:
    """f(y) = (y - 4)^2 / 2 and one client: FedCM comes to rest where y - 4 + decay_factor * wd * y = 0."""
    wd, fedcm, model = 0.05, fl.build("fedcm", alpha=0.25, order=order), torch.nn.Linear(1, 1, bias=False).double()
    state, settings = fedcm.init(fl.read_state(model).trainable), fl.LocalSettings(0.2, weight_decay=wd)
    batch = (torch.ones(1, 1, dtype=torch.float64), torch.full((1, 1), 4.0, dtype=torch.float64))
    for t in range(200):
        fl.load_state(model, fl.ModelState(state.x, {}, {}))
        rule = fedcm.local_rule(fedcm.direction(state))
        delta = fl.train_locally(model, [batch] * 2, lambda a, b: ((a - b) ** 2).mean() / 2, rule, settings).delta
        state = fl.apply_updates(fedcm, state, [(fl.UpdateInfo("a", 1, 2), delta)], fl.RoundInfo(t, 0.2))
    assert fedcm.decay_factor == {"paper": 1.0, "feddyn_code": 4.0}[order]
    assert float(state.x["weight"]) == pytest.approx(4.0 / (1.0 + fedcm.decay_factor * wd), rel=1e-9)


def test_momentum_does_not_see_the_server_rate(federation: Federation) -> None:
    """Delta is computed from the deltas: after one round it is the same for every eta_g, though x is not."""
    slow, fast = (federation.play(fl.build("fedcm", eta_g=eta_g), 1)[0] for eta_g in (0.5, 2.0))
    assert torch.equal(slow.memory["Delta"]["head"], fast.memory["Delta"]["head"])
    assert not torch.equal(slow.x["head"], fast.x["head"])


def test_client_without_the_momentum_is_refused() -> None:
    """A rule that needs Delta cannot be made without it."""
    with pytest.raises(fl.AlgorithmError, match="expected the momentum Delta in addition to the model, got none"):
        fl.build("fedcm").local_rule(None)
