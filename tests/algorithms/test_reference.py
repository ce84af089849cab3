"""The reference of deltas: what is left of a delta without gradients is nothing, for every method that has one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import algorithms as fl
from algorithms import tree
from algorithms.base import ClientContext, LocalSettings, Tensors
from algorithms.client import LocalData, Work, answer
from algorithms.optimizers.spec import RateSchedule
from algorithms.reference import KnownPart, Reference, has_reference, reference_of

WITH_DIRECTION = {"fedcm", "mimelite", "mime", "mofedsam", "qg", "mfl", "scaffold", "proxskip"}
STEPS = 5


def model() -> nn.Module:
    """A linear layer with the same values each time."""
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def direction_like(module: nn.Module) -> Tensors:
    """Random values of a direction."""
    torch.manual_seed(1)
    return {name: torch.randn_like(parameter) for name, parameter in module.named_parameters()}


def delta_of(algorithm: fl.Algorithm, exchange: int, direction: Tensors, settings: LocalSettings) -> Tensors:
    """The delta of a client whose gradients are all zero."""
    module = model()
    batch = (torch.randn(4, 3), torch.randn(4, 2))
    data = LocalData([batch] * STEPS, [batch], lambda output, target: 0.0 * (output - target).sum(), steps=STEPS)
    context = ClientContext(direction, algorithm.client_init(direction))
    return dict(answer(module, data, Work(algorithm, context, settings, exchange)).payloads["delta"])


@pytest.mark.parametrize("schedule", [RateSchedule(), RateSchedule("cosine", end=0.1)], ids=["constant", "cosine"])
@pytest.mark.parametrize("method", fl.names())
def test_without_gradients_the_delta_is_the_reference(method: str, schedule: RateSchedule) -> None:
    """r_i = 0 up to rounding for methods with a direction; the others have no reference."""
    algorithm = fl.build(method)
    exchange = next(number for number, it in enumerate(algorithm.exchanges) if "delta" in it.payloads)
    direction = direction_like(model())
    settings = LocalSettings(0.3, schedule=schedule)
    reference = reference_of(algorithm, exchange, direction if method in WITH_DIRECTION else None)
    assert (reference is not None) == (method in WITH_DIRECTION)
    if reference is not None:
        delta = delta_of(algorithm, exchange, direction, settings)
        rest = KnownPart(reference, reference.scale(settings, STEPS)).removed_from(delta)
        assert float(tree.norm(rest)) < 1e-5 * float(tree.norm(delta))


def test_a_method_with_a_neutral_direction_has_no_reference() -> None:
    """FedCM with alpha = 1 is FedAvg; MimeLite with beta = 0 as well."""
    direction = direction_like(model())
    for algorithm in (fl.build("fedcm", alpha=1.0), fl.build("mimelite", beta=0.0)):
        assert reference_of(algorithm, len(algorithm.exchanges) - 1, direction) is None


def test_an_exchange_without_training_has_no_reference() -> None:
    """Mime's first exchange sends full gradients."""
    assert reference_of(fl.build("mime"), 0, direction_like(model())) is None


def test_omega_scales_the_variate_of_scaffold() -> None:
    """A client with twice the mean number of examples subtracts c / 2 (objective by examples)."""
    direction = direction_like(model())
    reference = reference_of(fl.build("scaffold", objective="examples"), 0, direction, omega=2.0)
    assert reference is not None
    assert all(torch.equal(reference.tensors[name], 0.5 * direction[name]) for name in direction)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_removed_is_added_back(dtype: torch.dtype) -> None:
    """Up to rounding of the sum, in the dtype of the delta; with the same bits for any part of a tensor."""
    torch.manual_seed(2)
    delta = {"w": torch.randn(1001, dtype=dtype)}
    reference = Reference({"w": torch.randn(1001, dtype=torch.promote_types(dtype, torch.float32))}, 1.0)
    known = KnownPart(reference, 0.7)
    rest = known.removed_from(delta)
    back = known.added_to(rest)["w"]
    assert back.dtype == rest["w"].dtype == dtype
    assert torch.allclose(back, delta["w"], rtol=0, atol=float(8 * torch.finfo(dtype).eps))
    pieces = [known.added_to_part(part, "w", 13 * number) for number, part in enumerate(rest["w"].split(13))]
    assert torch.equal(torch.cat(pieces), back)


@pytest.mark.parametrize("method", fl.names())
def test_methods_with_a_reference(method: str) -> None:
    """Those whose clients add a direction of the server to their steps."""
    assert has_reference(fl.build(method)) == (method in WITH_DIRECTION)
