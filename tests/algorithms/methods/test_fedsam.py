"""SAM: in numbers worked by hand, and what the second pass must not change."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import algorithms as fl
from algorithms.ascent import ascent
from algorithms.conformance.federation import UNEVEN, Federation, everyone, flat, parabolas, path


def test_fedsam_by_hand() -> None:
    """f(y) = (y - 4)^2 / 2, rho = 1, eta_l = 0.5, from x = 0: g = -4, e = -1, gs = -5, x = 2.5.

    Round 1: g = -1.5, e = -1, gs = -2.5, x = 3.75.
    """
    one = parabolas(a=(4.0, 1))
    assert [x for (x,) in path(one, fl.build("fedsam", rho=1), everyone(one, 2))] == pytest.approx([2.5, 3.75])


def test_mofedsam_by_hand() -> None:
    """beta = 0.5.  Round 0: gs = -5, d = -2.5, x = 1.25, Delta = -2.5.

    Round 1: g = -2.75, gs = -3.75, d = 0.5 * -3.75 + 0.5 * -2.5 = -3.125, x = 2.8125, Delta = -3.125.
    """
    one = parabolas(a=(4.0, 1))
    seen = path(one, fl.build("mofedsam", rho=1, beta=0.5), everyone(one, 2), "Delta")
    assert seen == [pytest.approx((1.25, -2.5)), pytest.approx((2.8125, -3.125))]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (("mofedsam", {"rho": 0, "beta": 0.3}), ("fedcm", {"alpha": 0.3})),
        (("mofedsam", {"rho": 0.2, "beta": 1}), ("fedsam", {"rho": 0.2})),
        (("fedavg", {"gradient": "sam", "rho": 0.2, "weights": "uniform"}), ("fedsam", {"rho": 0.2})),
        (("fedcm", {"alpha": 0.3, "gradient": "sam", "rho": 0.2}), ("mofedsam", {"rho": 0.2, "beta": 0.3})),
    ],
    ids=["MoFedSAM(0, b) = FedCM(b)", "MoFedSAM(beta=1) = FedSAM", "FedAvg + sam", "FedCM + sam"],
)
def test_identities(federation: Federation, a: tuple[str, dict[str, Any]], b: tuple[str, dict[str, Any]]) -> None:
    """Two ways to one method: the same bits of x."""
    one, other = (flat(federation.run(fl.build(name, **own), UNEVEN)[-1].server.x) for name, own in (a, b))
    assert torch.equal(one, other)


def rule(rho: float) -> fl.LocalRule:
    """d = gs."""
    return fl.LocalRule(gradient=fl.GradientRule(rho=rho))


def trained(model: nn.Module, rho: float, seed: int = 0, **settings: Any) -> tuple[fl.LocalResult, Tensor]:
    """A model after three steps on the same batches, and the random state then."""
    torch.manual_seed(seed)
    batches = [(torch.randn(6, 4), torch.randn(6, 2)) for _ in range(3)]
    result = fl.train_locally(model, batches, nn.functional.mse_loss, rule(rho), fl.LocalSettings(0.1, **settings))
    return result, torch.get_rng_state()


def net(*layers: nn.Module) -> nn.Sequential:
    """A network of four inputs and two outputs with some layers between, the same values every time."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), *layers, nn.Linear(5, 2))


def test_second_pass_has_the_dropout_mask_of_the_first() -> None:
    """A tiny rho: with one mask gs is g to a tolerance, and random numbers go on as without SAM."""
    plain, random = trained(net(nn.Dropout(0.5)), 0.0)
    sam, random_of_sam = trained(net(nn.Dropout(0.5)), 1e-6)
    torch.testing.assert_close(plain.delta, sam.delta, rtol=0, atol=1e-5)
    assert torch.equal(random, random_of_sam)


def test_statistics_of_batch_norm_see_the_first_pass_alone() -> None:
    """One step: running mean, variance and counter are those of plain training, though gs is not g."""
    torch.manual_seed(0)
    batch = (torch.randn(6, 4), torch.randn(6, 2))
    plain, sam = (
        fl.train_locally(net(nn.BatchNorm1d(5)), [batch], nn.functional.mse_loss, rule(rho), fl.LocalSettings(0.1))
        for rho in (0.0, 0.5)
    )
    torch.testing.assert_close(plain.buffers, sam.buffers, rtol=0, atol=0)
    assert not torch.equal(plain.delta["0.weight"], sam.delta["0.weight"])


def test_ascent_has_one_norm_and_no_decay() -> None:
    """By closed form: e = rho g / ||g|| over all tensors with g of the loss alone, then d = gs + wd * y, clipped gs."""
    model, batch = net(), (torch.randn(6, 4), torch.randn(6, 2))
    y = dict(model.named_parameters())
    g = torch.autograd.grad(nn.functional.mse_loss(model(batch[0]), batch[1]), list(y.values()))
    length = torch.cat([gradient.flatten() for gradient in g]).norm()
    there = {name: p.detach() + 0.3 * gradient / length for (name, p), gradient in zip(y.items(), g, strict=True)}
    leaves = {name: p.clone().requires_grad_() for name, p in there.items()}
    output = torch.func.functional_call(model, leaves, (batch[0],))
    gs = torch.autograd.grad(nn.functional.mse_loss(output, batch[1]), list(leaves.values()))
    short = 0.5 / (torch.cat([gradient.flatten() for gradient in gs]).norm() + 1e-6)
    expected = {
        name: -0.1 * (short.clamp(max=1) * gradient + 0.2 * y[name].detach())
        for name, gradient in zip(leaves, gs, strict=True)
    }
    settings = fl.LocalSettings(0.1, weight_decay=0.2, max_gradient_norm=0.5)
    delta = fl.train_locally(model, [batch], nn.functional.mse_loss, rule(0.3), settings).delta
    torch.testing.assert_close(delta, expected, rtol=1e-4, atol=1e-6)


class Pair(nn.Module):
    """(y^2 + z^2) / 2 at y = 3, z = 4, so that g = (3, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.y, self.z = nn.Parameter(torch.tensor(3.0)), nn.Parameter(torch.tensor(4.0))

    def forward(self, inputs: Tensor) -> Tensor:
        return (self.y**2 + self.z**2) / 2 * inputs


@pytest.mark.parametrize(("scope", "expected"), [("model", (-6.0, -8.0)), ("tensor", (-8.0, -9.0))])
def test_scope_of_the_norm_by_hand(scope: fl.Scope, expected: tuple[float, float]) -> None:
    """rho = 5, rate 1: one norm of 5 gives e = (3, 4) and gs = (6, 8); one for each tensor e = (5, 5), gs = (8, 9)."""
    batch, rule = (torch.ones(1), torch.zeros(1)), fl.LocalRule(gradient=fl.GradientRule(rho=5.0, scope=scope))
    delta = fl.train_locally(Pair(), [batch], lambda output, _: output.mean(), rule, fl.LocalSettings(1.0)).delta
    assert (delta["y"].item(), delta["z"].item()) == pytest.approx(expected)


def step_in_norm(g: Tensor, rho: float, p: float) -> Tensor:
    """e = rho sign(g) |g|^(q-1) / (||g||_q^q)^(1/p), as printed."""
    q = p / (p - 1)
    return rho * g.sign() * g.abs() ** (q - 1) / (g.abs() ** q).sum() ** (1 / p)


@pytest.mark.parametrize("scope", ["model", "tensor"])
@pytest.mark.parametrize("p", [1.2, 1.9, 2.0, 3.0, 20.0])
def test_p_norm_agrees_with_the_printed_formula(p: float, scope: fl.Scope) -> None:
    """In float64 d is the gradient at y + e to 1e-12, with e of a reference that has the formula of the paper."""
    model, inputs, targets = net().double(), torch.randn(6, 4).double(), torch.randn(6, 2).double()
    y = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}

    def slopes(at: dict[str, Tensor]) -> dict[str, Tensor]:
        loss = nn.functional.mse_loss(torch.func.functional_call(model, at, (inputs,)), targets)
        return dict(zip(at, torch.autograd.grad(loss, list(at.values())), strict=True))

    g = slopes(y)
    whole = step_in_norm(torch.cat([gradient.flatten() for gradient in g.values()]), 0.3, p)
    parts = whole.split([gradient.numel() for gradient in g.values()])
    e = {name: part.view_as(g[name]) for name, part in zip(g, parts, strict=True)}
    if scope == "tensor":
        e = {name: step_in_norm(gradient, 0.3, p) for name, gradient in g.items()}
    expected = slopes({name: (y[name].detach() + e[name]).requires_grad_() for name in y})
    sam = fl.LocalRule(gradient=fl.GradientRule(rho=0.3, scope=scope, p=p))
    found = fl.train_locally(model, [(inputs, targets)], nn.functional.mse_loss, sam, fl.LocalSettings(1.0)).delta
    for name, gradient in expected.items():
        torch.testing.assert_close(-found[name], gradient, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("p", [1.001, 1.5, 4.0, 1e9])
@pytest.mark.parametrize("size", [1e-44, 1e-20, 1.0, 1e30])
def test_ascent_has_length_rho_for_gradients_of_any_size(p: float, size: float) -> None:
    """In float32 ||e||_p = rho, also where powers of the gradient leave the range of float32 or are 0 in it."""
    g = {"y": torch.tensor([3.0, -4.0]) * size, "z": torch.tensor([[1.0], [0.0]]) * size}
    e = torch.cat([tensor.flatten() for tensor in ascent(g, fl.GradientRule(rho=0.5, p=p), None).values()]).double()
    sizes = e.abs() / e.abs().max()
    assert (e.abs().max() * (sizes**p).sum() ** (1 / p)).item() == pytest.approx(
        0.5, rel=1e-2 if size < 1e-40 else 1e-5
    )


def test_large_p_comes_close_to_the_sign_of_the_gradient() -> None:
    """At p = 1e9 every entry that is not 0 moves by rho, in the direction of its sign."""
    e = ascent({"y": torch.tensor([3.0, -4e-9, 0.0])}, fl.GradientRule(rho=0.5, p=1e9), None)
    torch.testing.assert_close(e["y"], torch.tensor([0.5, -0.5, 0.0]))


@pytest.mark.parametrize("p", [1, 0.5, -2.0, math.inf, math.nan])
def test_p_must_be_finite_and_over_one(p: float) -> None:
    """The error of a p that has no step says which ones have."""
    with pytest.raises(fl.AlgorithmError, match=r"fedsam, parameter 'sam_p': expected a number over 1; got"):
        fl.build("fedsam", sam_p=p)


@pytest.mark.parametrize("p", [1.5, 2.0, 4.0])
@pytest.mark.parametrize("scope", ["model", "tensor"])
def test_ascent_of_a_zero_gradient_is_zero(p: float, scope: fl.Scope) -> None:
    """e = 0, and no NaN, in every norm."""
    e = ascent({"y": torch.zeros(2, 3), "z": torch.zeros(())}, fl.GradientRule(rho=0.5, scope=scope, p=p), None)
    assert not any(tensor.any() for tensor in e.values())


def test_zero_gradient_is_not_divided_by() -> None:
    """For g = 0 the ascent is 0: no NaN, no step."""
    model = nn.Linear(1, 1)
    batch = (torch.zeros(2, 1), model.bias.detach().expand(2, 1).clone())
    delta = fl.train_locally(model, [batch], nn.functional.mse_loss, rule(0.5), fl.LocalSettings(0.1)).delta
    assert all(torch.equal(tensor, torch.zeros_like(tensor)) for tensor in delta.values())
