"""DP-SGD: the noise of a step, its secret streams, and the methods whose steps it makes private."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import algorithms as fl
from algorithms import tree
from algorithms.client import LocalData, Work, answer
from algorithms.privacy.dp_sgd import Privacy, conflict
from algorithms.privacy.random_bits import normals, poisson_draw, uniforms
from fl_common.privacy.secret_stream import SecretStream, derived

RANDOM = SecretStream(derived(bytes(32), "a test"))
EXAMPLES = torch.randn(40, 6, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 3


def privacy(noise: float = 1.0, clip: float = 0.5) -> Privacy:
    """Batches of 8 of 40 examples."""
    return Privacy(noise, clip, 8 / 40, 40, RANDOM)


def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Poisson batches of the examples."""
    drawn = [poisson_draw(RANDOM, step, 40, 8 / 40) for step in range(steps)]
    return [(EXAMPLES[0][chosen], EXAMPLES[1][chosen]) for chosen in drawn]


def trained(
    method: fl.Algorithm, given: Privacy | None, settings: fl.LocalSettings, direction: fl.Tensors | None = None
) -> fl.ClientUpdate:
    """The update of a client that makes three steps from the same model."""
    torch.manual_seed(2)
    model = nn.Linear(6, 3)
    data = LocalData(batches(3), (), functional.cross_entropy, privacy=given)
    return answer(model, data, Work(method, fl.ClientContext(direction), settings))


def test_normal_numbers_have_the_moments_and_the_tails_of_the_distribution() -> None:
    """Mean, variance, kurtosis and the share beyond 3 of a million numbers."""
    drawn = normals(RANDOM, "noise", 0, 1_000_001)
    assert len(drawn) == 1_000_001
    assert abs(drawn.mean().item()) < 5e-3
    assert abs(drawn.var().item() - 1.0) < 7e-3
    assert abs((drawn**4).mean().item() - 3.0) < 0.06
    assert abs((drawn.abs() > 3).double().mean().item() - math.erfc(3 / math.sqrt(2))) < 3e-4
    assert torch.isfinite(drawn).all()


def test_streams_depend_on_secret_purpose_and_step_alone() -> None:
    """Equal arguments give equal numbers; another secret, purpose or step gives others; torch's seed has no effect."""
    first = uniforms(RANDOM, "noise", 3, 100)
    torch.manual_seed(5)
    assert torch.equal(first, uniforms(SecretStream(derived(bytes(32), "a test")), "noise", 3, 100))
    assert torch.equal(first[:10], uniforms(RANDOM, "noise", 3, 10))
    others = [
        uniforms(RANDOM, "noise", 4, 100),
        uniforms(RANDOM, "draw", 3, 100),
        uniforms(SecretStream(derived(bytes(31) + b"\x01", "a test")), "noise", 3, 100),
    ]
    assert all(not torch.isin(other, first).any() for other in others)
    assert derived(b"s", "ab", "c") != derived(b"s", "a", "bc")


def test_each_example_is_drawn_by_itself() -> None:
    """The sizes of Poisson batches have the binomial variance, and each example comes as often as the rate says."""
    drawn = [poisson_draw(RANDOM, step, 100, 0.2) for step in range(4000)]
    sizes = torch.tensor([float(len(one)) for one in drawn])
    assert abs(sizes.mean().item() - 20.0) < 0.4
    assert abs(sizes.var().item() - 16.0) < 2.0
    counts = torch.cat(drawn).bincount(minlength=100) / 4000
    assert (counts - 0.2).abs().max().item() < 0.03
    assert len(poisson_draw(RANDOM, 0, 100, 1.0)) == 100


def test_the_noise_of_a_step_has_the_variance_that_is_accounted_for() -> None:
    """Between two runs that differ in their secrets alone, a step differs by noise of sqrt(2) z C / (q n)."""
    torch.manual_seed(2)
    model, z, clip = nn.Linear(200, 100), 1.5, 0.3
    batch = (torch.randn(8, 200), torch.arange(8) % 100)
    found = []
    for secret in (b"a", b"b"):
        given = Privacy(z, clip, 8 / 40, 40, SecretStream(derived(secret, "noise")))
        data = LocalData([batch], (), functional.cross_entropy, privacy=given)
        work = Work(fl.build("fedavg"), fl.ClientContext(), fl.LocalSettings(1.0))
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        found.append(answer(model, data, work).payloads["delta"])
        for name, p in model.named_parameters():
            p.data.copy_(start[name])
    apart = torch.cat([tensor.flatten() for tensor in tree.subtract(*found).values()])
    assert apart.std().item() == pytest.approx(math.sqrt(2) * z * clip / 8, rel=0.02)


def test_without_noise_and_with_a_wide_clip_the_steps_are_those_of_the_sum_over_the_expected_size() -> None:
    """The sum is divided by q n, not by the size that was drawn."""
    private = trained(fl.build("fedavg"), privacy(0.0, 1e6), fl.LocalSettings(0.1))
    torch.manual_seed(2)
    model = nn.Linear(6, 3)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    for inputs, targets in batches(3):
        model.zero_grad()
        (functional.cross_entropy(model(inputs), targets, reduction="sum") / 8).backward()
        for p in model.parameters():
            assert p.grad is not None
            p.data -= 0.1 * p.grad
    for name, p in model.named_parameters():
        torch.testing.assert_close(private.payloads["delta"][name], p.detach() - start[name], atol=1e-6, rtol=1e-5)


def test_what_comes_after_the_noise_is_exact() -> None:
    """FedCM mixes the direction with the noisy gradient, and weight decay follows the model, as without privacy."""
    torch.manual_seed(4)
    direction = {"weight": torch.randn(3, 6), "bias": torch.randn(3)}
    method, alpha, rate, decay = fl.build("fedcm", alpha=0.4), 0.4, 0.1, 0.05
    with_all = trained(method, privacy(), fl.LocalSettings(rate, weight_decay=decay), direction)
    torch.manual_seed(2)
    model = nn.Linear(6, 3)
    y = {name: p.detach().clone() for name, p in model.named_parameters()}
    start = tree.map(torch.clone, y)
    one_step = privacy()
    for step, batch in enumerate(batches(3)):
        tree.copy_(dict(tree.map(torch.detach, dict(model.named_parameters()))), y)
        data = LocalData([batch], (), functional.cross_entropy, privacy=_from_step(one_step, step))
        g = answer(model, data, Work(fl.build("fedavg"), fl.ClientContext(), fl.LocalSettings(1.0))).payloads["delta"]
        for name, tensor in y.items():
            d = alpha * (-g[name] + decay * tensor) + (1 - alpha) * direction[name]
            y[name] = tensor - rate * d
    for name, tensor in y.items():
        torch.testing.assert_close(with_all.payloads["delta"][name], tensor - start[name], atol=1e-5, rtol=1e-4)


def _from_step(given: Privacy, first: int) -> Privacy:
    """The same mechanism, whose steps count from another one."""

    def random(purpose: str, step: int, count: int) -> bytearray:
        return given.random(purpose, first + step, count)

    return Privacy(given.noise_multiplier, given.clip, given.rate, given.examples, random)


def test_private_steps_measure_no_loss_and_keep_buffers() -> None:
    """The loss of a batch has no noise; a buffer that a pass changes keeps its value."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 3)
            self.seen: torch.Tensor
            self.register_buffer("seen", torch.zeros(6))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.seen += inputs.mean(0)
            return self.inner(inputs)  # type: ignore[no-any-return]

    data = LocalData(batches(2), (), functional.cross_entropy, privacy=privacy(), epoch_steps=0)
    update = answer(Counting(), data, Work(fl.build("fedavg"), fl.ClientContext(), fl.LocalSettings(0.1)))
    assert update.loss is None
    assert not update.epochs
    assert not update.buffers["seen"].any()


PRIVATE = {"fedavg", "fedavgm", "fedcm", "feddemon", "feddemonadam", "fedprox", "slowmo", "diloco", "qg", "mfl"}


@pytest.mark.parametrize("name", fl.names())
def test_methods_are_private_or_refused_with_the_reason(name: str) -> None:
    """Methods with a second pass, an unnoised gradient or a client state are refused, and no other."""
    why = conflict(fl.build(name))
    refused = {"fedsam", "mofedsam", "mime", "mimelite", "scaffold", "feddyn"}
    if name in refused:
        assert why
    if name in PRIVATE:
        assert not why


@pytest.mark.parametrize("name", ["fedsam", "mime", "mimelite", "scaffold", "feddyn"])
def test_a_refused_method_makes_no_step(name: str) -> None:
    """The client half checks for itself."""
    with pytest.raises(fl.AlgorithmError, match="expected a method whose steps DP-SGD can make private"):
        trained(fl.build(name), privacy(), fl.LocalSettings(0.1))


def test_a_second_clip_is_refused() -> None:
    """The norm of a noisy gradient is no limit of an example."""
    with pytest.raises(fl.AlgorithmError, match="expected max_gradient_norm = 0 with DP-SGD"):
        trained(fl.build("fedavg"), privacy(), fl.LocalSettings(0.1, max_gradient_norm=1.0))
