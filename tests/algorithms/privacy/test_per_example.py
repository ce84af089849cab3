"""Gradients of single examples: clipped as a loop clips them, for models of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from algorithms import AlgorithmError, tree
from algorithms.batches import forward_pair
from algorithms.privacy import per_example
from algorithms.privacy.per_example import ClippedGradients, Clipping
from fl_tasks.models import grey_cnn

CLIP = 0.5


class Recurrent(nn.Module):
    """An LSTM, which torch.func cannot map over examples."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.lstm = nn.LSTM(4, 6, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        """[examples, length] -> [examples, 3]."""
        output: Tensor = self.head(self.lstm(self.embedding(inputs))[0][:, -1])
        return output


class Tied(nn.Module):
    """A model with one weight in two places, and a parameter that no example reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, inputs: Tensor) -> Tensor:
        """[examples, 4] -> [examples, 4]."""
        output: Tensor = self.second(self.first(inputs).tanh()) * self.scale
        return output


class Sequence(nn.Module):
    """Attention and convolutions over the positions of a sequence, whose linear layers are used at each position."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6, bias=False)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.near = nn.Conv1d(6, 6, 3, padding=2, dilation=2)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        """[examples, length, 4] -> [examples, 3]."""
        x = self.up(inputs)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.norm(x + self.near(x.transpose(1, 2)).transpose(1, 2))
        output: Tensor = self.head(x).mean(1)
        return output


class Penalised(nn.Module):
    """A linear layer whose weight and bias are used in another way too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        """[examples, 4] -> [examples, 3]."""
        output: Tensor = self.linear(inputs) * self.linear.weight.norm() + self.linear.bias.sin()
        return output


class Changing(nn.Module):
    """The layers that are used change from pass to pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.passes = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), 0

    def forward(self, inputs: Tensor) -> Tensor:
        """[examples, 4] -> [examples, 4]."""
        self.passes += 1
        output: Tensor = self.layers[1](inputs)
        return output if self.passes == 1 else self.layers[0](self.layers[0](output))


def _convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 3))


def _other_convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 0), bias=False),
        nn.Tanh(),
        nn.Conv2d(4, 3, 2, dilation=2, padding_mode="circular", padding=1),
        nn.Flatten(),
        nn.LazyLinear(3),
    )


def _grouped() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 2, 3, padding="same"), nn.Flatten(), nn.Linear(18, 3)
    )


def _partly_frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
    for parameter in (*model[0].parameters(), model[2].weight, model[4].bias):
        parameter.requires_grad_(False)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(4, 3), lambda: torch.randn(11, 4)),
    "convolutions with group norm": (_convolutional, lambda: torch.randn(11, 1, 6, 6)),
    "other convolutions": (_other_convolutions, lambda: torch.randn(11, 2, 9, 9)),
    "convolutions in groups and of the same size": (_grouped, lambda: torch.randn(11, 4, 5, 5)),
    "attention over a sequence": (Sequence, lambda: torch.randn(11, 5, 4)),
    "a weight that is used twice": (Penalised, lambda: torch.randn(11, 4)),
    "frozen parts": (_partly_frozen, lambda: torch.randn(11, 4)),
    "an LSTM": (Recurrent, lambda: torch.randint(0, 5, (11, 7))),
    "tied weights": (Tied, lambda: torch.randn(11, 4)),
}


def by_loop(model: nn.Module, inputs: Tensor, targets: Tensor, clip: float) -> dict[str, Tensor]:
    """The same sum by one backward pass for each example, in float64."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in trained.items()}
    for one in range(len(inputs)):
        model.zero_grad()
        functional.cross_entropy(model(inputs[one : one + 1]), targets[one : one + 1]).backward()
        g = {name: (torch.zeros_like(p) if p.grad is None else p.grad).double() for name, p in trained.items()}
        factor = min(1.0, clip / max(tree.norm(g).item(), 1e-300))
        for name, tensor in g.items():
            total[name] += factor * tensor
    model.zero_grad()
    return total


@pytest.mark.parametrize("chunk", [0, 1, 4])
@pytest.mark.parametrize("kind", MODELS)
def test_the_sum_is_that_of_a_loop(kind: str, chunk: int) -> None:
    """Each example is clipped alone, whatever the chunk, at 1e-6; some examples are over the clip and some under."""
    torch.manual_seed(3)
    make_model, make_inputs = MODELS[kind]
    model, inputs = make_model().train(), make_inputs()
    model(inputs)  # gives a lazy layer its shape
    targets = torch.randint(0, 3, (len(inputs),))
    total = ClippedGradients(model, functional.cross_entropy, forward_pair, Clipping(CLIP, chunk)).sum(
        (inputs, targets)
    )
    wanted = by_loop(model, inputs, targets, CLIP)
    assert total.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(total[name].double(), tensor, atol=1e-6, rtol=1e-6)


def test_layers_that_change_from_pass_to_pass() -> None:
    """A layer that is used in another way than for the first example gets its whole gradient."""
    torch.manual_seed(3)
    model, inputs, targets = Changing(), torch.randn(5, 4), torch.arange(5) % 3
    total = ClippedGradients(model, functional.cross_entropy, forward_pair, Clipping(CLIP)).sum((inputs, targets))
    assert model.passes > 1
    for name, tensor in by_loop(model, inputs, targets, CLIP).items():
        torch.testing.assert_close(total[name].double(), tensor, atol=1e-6, rtol=1e-6)


def test_examples_of_several_shapes() -> None:
    """Each batch has the layers of its own shapes."""
    torch.manual_seed(3)
    model = Sequence()
    clipped = ClippedGradients(model, functional.cross_entropy, forward_pair, Clipping(CLIP))
    for length in (5, 1, 3):
        inputs, targets = torch.randn(4, length, 4), torch.arange(4) % 3
        total = clipped.sum((inputs, targets))
        for name, tensor in by_loop(model, inputs, targets, CLIP).items():
            torch.testing.assert_close(total[name].double(), tensor, atol=1e-6, rtol=1e-6)


def test_the_gradients_in_memory_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch whose gradients have no room together is computed in parts; a layer's product needs little room."""
    sizes: list[int] = []
    real = ClippedGradients._mapped

    def noted(self: ClippedGradients, parameters: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Any:
        sizes.append(len(batch[0]))
        return real(self, parameters, batch)

    monkeypatch.setattr(ClippedGradients, "_mapped", noted)
    monkeypatch.setattr(per_example, "CHUNK_BYTES", 4 * 1000)
    for model, inputs, expected in (
        (nn.Conv2d(1, 2, 2), torch.randn(10, 1, 4, 4), [10]),
        (nn.Conv2d(1, 20, 2), torch.randn(10, 1, 4, 4), [3, 3, 3, 1]),
        (nn.Linear(100, 100), torch.randn(10, 100), [3, 3, 3, 1]),
    ):
        sizes.clear()
        clipped = ClippedGradients(model, lambda output, _: output.square().sum(), forward_pair, Clipping(CLIP))
        clipped.sum((inputs, torch.zeros(10)))
        assert sizes == expected


def test_the_sum_is_that_of_opacus() -> None:
    """Opacus computes the same gradients of single examples by its hooks."""
    opacus = pytest.importorskip("opacus", reason="opacus is not installed")
    torch.manual_seed(3)
    model = grey_cnn().train()
    inputs, targets = torch.randn(9, 1, 28, 28), torch.randint(0, 10, (9,))
    ours = ClippedGradients(model, functional.cross_entropy, forward_pair, Clipping(CLIP)).sum((inputs, targets))
    hooked = opacus.GradSampleModule(model)
    functional.cross_entropy(hooked(inputs.requires_grad_()), targets).backward()
    samples = {name: vars(parameter)["grad_sample"] for name, parameter in model.named_parameters()}
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in samples.values()]).norm(dim=0)
    assert (norms > CLIP).any()
    factors = (CLIP / norms).clamp(max=1.0)
    for name, g in samples.items():
        torch.testing.assert_close(ours[name], torch.einsum("e,e...->...", factors, g), atol=1e-6, rtol=1e-6)


def test_one_example_changes_the_sum_by_at_most_the_clip() -> None:
    """An example whose loss is huge, infinite or not a number moves the sum by C or not at all."""
    torch.manual_seed(3)
    model, inputs, targets = nn.Linear(4, 3), torch.randn(6, 4), torch.randint(0, 3, (6,))
    clipped = ClippedGradients(model, functional.cross_entropy, forward_pair, Clipping(CLIP))
    without = clipped.sum((inputs, targets))
    for extreme in (1e6, 1e30, float("inf"), float("nan")):
        more = torch.cat([inputs, torch.full((1, 4), extreme)])
        total = clipped.sum((more, torch.cat([targets, torch.tensor([1])])))
        assert tree.norm(tree.subtract(total, without)).item() <= CLIP * (1 + 1e-6)


def test_a_batch_without_examples_is_zero() -> None:
    """A Poisson batch may be empty."""
    model = nn.Linear(4, 3)
    total = ClippedGradients(model, functional.cross_entropy, forward_pair, Clipping(CLIP)).sum(
        (torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))
    )
    assert all(
        tensor.shape == p.shape and not tensor.any()
        for tensor, p in zip(total.values(), model.parameters(), strict=True)
    )


def test_batches_of_another_structure() -> None:
    """A dict is mapped, and texts beside the tensors are not: both give the same sum."""
    torch.manual_seed(3)
    model = nn.Linear(4, 3)
    inputs, targets = torch.randn(5, 4), torch.randint(0, 3, (5,))

    def forward(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return model(batch["x"]), batch["y"]

    clipped = ClippedGradients(model, functional.cross_entropy, forward, Clipping(CLIP))
    mapped = clipped.sum({"x": inputs, "y": targets})
    looped = clipped.sum({"x": inputs, "y": targets, "names": ["a", "b", "c", "d", "e"]})
    for name, tensor in mapped.items():
        torch.testing.assert_close(tensor, looped[name])


def test_batch_norm_is_refused_with_the_remedy() -> None:
    """Under batch norm no example has a gradient of its own."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    with pytest.raises(AlgorithmError, match=r"without batch norm.* BatchNorm2d '1'; use torch.nn.GroupNorm"):
        ClippedGradients(model, functional.cross_entropy, forward_pair, Clipping(CLIP))
