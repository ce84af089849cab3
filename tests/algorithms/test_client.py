"""A client's payloads in one exchange: full gradients, payloads, refused inputs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import algorithms as fl
from algorithms.conformance.federation import Federation, Round, flat
from algorithms.gradients import full_gradient


def net() -> nn.Sequential:
    """Four inputs, two outputs, with dropout and batch norm on the way."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 2))


def whole(model: nn.Module, sizes: list[int], **settings: Any) -> fl.Tensors:
    """The full gradient over batches of some sizes, of one set of examples."""
    random = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(sum(sizes), 4, generator=random), torch.randn(sum(sizes), 2, generator=random)
    batches = zip(inputs.split(sizes), targets.split(sizes), strict=True)
    all_settings = fl.LocalSettings(0.1, **settings)
    return full_gradient(model, batches, nn.functional.mse_loss, all_settings, fl.GradientRule())


def test_full_gradient_is_the_mean_over_examples() -> None:
    """Batches of 6 and 2 are weighted 3 to 1: the gradient of one batch of 8."""
    model = nn.Linear(4, 2)
    torch.testing.assert_close(whole(model, [6, 2]), whole(model, [8]))


def test_full_gradient_has_the_decay_inside() -> None:
    """wd * y is part of every g, so it is part of their mean."""
    model = nn.Linear(4, 2)
    plain, decayed = whole(model, [6, 2]), whole(model, [6, 2], weight_decay=0.5)
    torch.testing.assert_close(decayed["weight"] - plain["weight"], 0.5 * model.weight.detach())


def test_full_gradient_leaves_no_trace() -> None:
    """Parameters, running statistics and random numbers are as before; no gradient is left."""
    model = net()
    before, random = fl.read_state(model), torch.get_rng_state()
    whole(model, [6, 2])
    after = fl.read_state(model)
    torch.testing.assert_close((before.trainable, before.buffers), (after.trainable, after.buffers), rtol=0, atol=0)
    assert torch.equal(random, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_full_gradient_of_nothing_is_refused() -> None:
    """A client without examples has no gradient."""
    with pytest.raises(ValueError, match="expected at least one batch for a full gradient, got none"):
        full_gradient(nn.Linear(4, 2), [], nn.functional.mse_loss, fl.LocalSettings(0.1), fl.GradientRule())


def test_payloads_have_the_order_of_the_exchange(federation: Federation) -> None:
    """Each method's clients send what its exchanges name, laid out as the trainable parameters."""
    for name in fl.names():
        algorithm = fl.build(name)
        [(_, update), *_] = federation.answers(algorithm, federation.start(algorithm), {}, Round()).values()
        assert tuple(update.payloads) == algorithm.exchanges[0].payloads
        assert all(
            {k: t.shape for k, t in sent.items()} == {k: t.shape for k, t in federation.x.items()}
            for sent in update.payloads.values()
        )


def test_only_the_delta_is_clipped(federation: Federation) -> None:
    """An update admitted at a factor has that much of its delta, and all of its other payloads."""
    algorithm = fl.build("scaffold", option="I")
    [(_, update), *_] = federation.answers(algorithm, federation.start(algorithm), {}, Round()).values()
    half = update.admitted(0.5)
    assert torch.equal(flat(half.payloads["delta"]), 0.5 * flat(update.payloads["delta"]))
    assert half.payloads["variate_change"] is update.payloads["variate_change"]
    assert update.admitted(1.0) is update


def test_methods_without_client_state_keep_none(federation: Federation) -> None:
    """FedCM's clients start and end without a state."""
    fedcm = fl.build("fedcm")
    assert not fedcm.keeps_client_state
    assert not fedcm.client_init(federation.x)
    assert set(map(len, federation.run(fedcm, [Round()])[0].clients.values())) == {0}


@pytest.mark.parametrize("factor", [0.0, 1.5, float("nan")])
def test_clip_factor_out_of_range_is_refused(factor: float) -> None:
    """A factor of 0 would be an update that did not count; over 1 is no clip."""
    with pytest.raises(ValueError, match="expected a clip factor over 0 and at most 1"):
        fl.UpdateInfo("a", 1, 1, clip_factor=factor)


def test_local_steps_can_be_interrupted(federation: Federation) -> None:
    """`on_step` is called for every step, and its exceptions are raised."""
    fedavg, client = fl.build("fedavg"), dataclasses.replace(federation.clients[0], steps=5)
    seen = []

    def stop(step: int) -> None:
        seen.append(step)
        if step == 2:
            raise InterruptedError

    work = fl.Work(fedavg, fl.ClientContext(), federation.settings)
    with pytest.raises(InterruptedError):
        fl.answer(federation.model(federation.x), client.data(federation.x["head"]), work, stop)
    assert seen == [0, 1, 2]
