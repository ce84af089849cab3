"""Sharpness of a model, against autograd's full Hessian of a tiny one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from algorithms.sharpness import (
    MeanLoss,
    filter_normalised,
    largest_eigenvalue,
    moved,
    quadratic_forms,
    trace,
)

DTYPE = torch.float64


def a_model(dtype: torch.dtype = DTYPE) -> nn.Module:
    """A convolution, a batch norm, dropout and a linear layer: 56 trainable parameters, in training mode."""
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Tanh(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(8, 3)
    )
    return model.to(dtype)


def a_loss(model: nn.Module, *sizes: int) -> MeanLoss:
    """Cross entropy over 11 examples in chunks of these sizes."""
    generator = torch.Generator().manual_seed(2)
    dtype = next(model.parameters()).dtype
    inputs = torch.randn(11, 1, 4, 4, generator=generator, dtype=DTYPE).to(dtype)
    targets = torch.randint(0, 3, (11,), generator=generator)
    parts = zip(inputs.split(sizes or (11,)), targets.split(sizes or (11,)), strict=True)
    return MeanLoss(model, functional.cross_entropy, list(parts))


def full_hessian(loss: MeanLoss) -> Tensor:
    """The Hessian [d, d] by autograd, of all examples at once."""
    model = loss.model.eval()
    named = dict(model.named_parameters())
    inputs, targets = (torch.cat(parts) for parts in zip(*loss.batches, strict=True))

    def value(flat: Tensor) -> Tensor:
        pieces = flat.split([tensor.numel() for tensor in named.values()])
        values = {name: piece.view(named[name].shape) for name, piece in zip(named, pieces, strict=True)}
        return functional.cross_entropy(functional_call(model, values, (inputs,)), targets)

    flat = torch.cat([tensor.detach().reshape(-1) for tensor in named.values()])
    hessian = torch.autograd.functional.hessian(value, flat)
    assert isinstance(hessian, Tensor)
    return hessian


def test_the_largest_eigenvalue_is_that_of_the_full_hessian() -> None:
    """To 1e-8 of it, in float64, with the examples in chunks of different sizes."""
    loss = a_loss(a_model(), 4, 4, 3)
    found = largest_eigenvalue(loss, iterations=200, tolerance=1e-7)
    expected = float(torch.linalg.eigvalsh(full_hessian(loss))[-1])
    assert found.value == pytest.approx(expected, rel=1e-8)
    assert found.residual <= 1e-7 * found.value
    assert found.products < 200


def test_few_iterations_state_how_far_an_eigenvalue_is() -> None:
    """The residual bounds the distance to the nearest eigenvalue, also where the iterations were too few."""
    loss = a_loss(a_model())
    found = largest_eigenvalue(loss, iterations=3, tolerance=0.0)
    distance = (torch.linalg.eigvalsh(full_hessian(loss)) - found.value).abs().min()
    assert found.products == 3
    assert distance <= found.residual


def test_the_trace_of_all_basis_vectors_is_exact() -> None:
    """The sum of <e_i, H e_i> is the full Hessian's trace."""
    loss = a_loss(a_model(), 6, 5)
    hessian = full_hessian(loss)
    forms = quadratic_forms(loss, torch.eye(len(hessian), dtype=DTYPE))
    assert sum(forms) == pytest.approx(float(hessian.trace()), rel=1e-10)


def test_the_trace_of_random_signs_is_within_its_standard_error() -> None:
    """Four standard errors hold it, and the error is that of Hutchinson's variance, 2 (||H||_F^2 - sum H_ii^2)."""
    loss = a_loss(a_model())
    hessian = full_hessian(loss)
    found = trace(loss, probes=200)
    exact = float(hessian.trace())
    assert abs(found.value - exact) < 4 * found.standard_error
    variance = 2 * float(hessian.square().sum() - hessian.diagonal().square().sum())
    assert found.standard_error == pytest.approx((variance / 200) ** 0.5, rel=0.25)


def test_the_model_is_left_as_it_was() -> None:
    """Values, buffers, training modes and torch's generator are the same after all measures; the numbers repeat."""
    model = a_model(torch.float32)
    loss = a_loss(model, 4, 7)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    numbers = [(largest_eigenvalue(loss), trace(loss), loss.rise(0.1)) for _ in range(2)]
    assert numbers[0] == numbers[1]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_float32_agrees_with_float64() -> None:
    """To 1e-4: the passes have the model's dtype, the sums float64."""
    wide, narrow = (a_loss(a_model(dtype), 4, 7) for dtype in (torch.float64, torch.float32))
    assert largest_eigenvalue(narrow).value == pytest.approx(largest_eigenvalue(wide).value, rel=1e-4)
    assert trace(narrow).value == pytest.approx(trace(wide).value, rel=1e-4)


def test_the_rise_is_that_of_the_step_up_the_gradient() -> None:
    """For L = w^2 at w = 3 with rho = 0.5: 3.5^2 - 3^2 = 3.25."""
    model = nn.Linear(1, 1, bias=False, dtype=DTYPE)
    nn.init.constant_(model.weight, 3.0)
    ones, zeros = torch.ones(2, 1, dtype=DTYPE), torch.zeros(2, 1, dtype=DTYPE)
    loss = MeanLoss(model, functional.mse_loss, [(ones, zeros)])
    assert loss.rise(0.5) == pytest.approx(3.25, rel=1e-12)
    assert (largest_eigenvalue(loss).value, trace(loss, probes=2).value) == (2.0, 2.0)


def test_a_loss_that_is_linear_in_the_parameters_is_flat() -> None:
    """Its Hessian is zero."""
    model = nn.Linear(2, 1, dtype=DTYPE)
    loss = MeanLoss(model, lambda output, _: output.mean(), [(torch.ones(3, 2, dtype=DTYPE), torch.zeros(3))])
    assert (largest_eigenvalue(loss).value, trace(loss, probes=2).value) == (0.0, 0.0)


@pytest.mark.parametrize(
    "layer", [nn.LSTM(2, 3, batch_first=True), nn.TransformerEncoderLayer(2, 1, 4, 0.0, batch_first=True)]
)
def test_attention_and_recurrent_layers_have_second_derivatives(layer: nn.Module) -> None:
    """Fused kernels have none, so others are used."""

    def loss(output: Any, _: Tensor) -> Tensor:
        states: Tensor = output[0] if isinstance(output, tuple) else output
        return states.square().mean()

    of = MeanLoss(layer, loss, [(torch.randn(2, 3, 2), torch.zeros(2))])
    assert largest_eigenvalue(of).value > 0


def test_a_direction_has_the_norms_of_the_models_filters() -> None:
    """Each filter of a weight has the model's own norm; biases and the weights of norms get zeros."""
    model = a_model()
    direction = filter_normalised(model, 3)
    for name, parameter in model.named_parameters():
        own, drawn = parameter.detach(), direction[name]
        if own.dim() < 2:
            assert not drawn.any()
        else:
            torch.testing.assert_close(drawn.flatten(1).norm(dim=1), own.flatten(1).norm(dim=1))
    again, other = filter_normalised(model, 3), filter_normalised(model, 4)
    assert torch.equal(again["0.weight"], direction["0.weight"])
    assert not torch.equal(other["0.weight"], direction["0.weight"])


def test_a_moved_model_comes_back() -> None:
    """Within the block it is w + 2 d - e, and afterwards it has its own bits, also after an error."""
    model = a_model(torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    d, e = filter_normalised(model, 1), filter_normalised(model, 2)
    with moved(model, [(2.0, d), (-1.0, e)]):
        there = model.state_dict()["0.weight"].clone()
    torch.testing.assert_close(there, before["0.weight"] + 2 * d["0.weight"] - e["0.weight"])
    with pytest.raises(KeyError), moved(model, [(1.0, d)]):
        raise KeyError
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
