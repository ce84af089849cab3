"""Tasks of processes under test whose models are unusual in one way each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fl_tasks import Classifier, Examples, Shard

FEATURES, CLASSES = 4, 3


class Plain(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        """Scores, [n, 3]."""
        output: Tensor = self.layer(inputs)
        return output


class Constants(Plain):
    """A causal mask of minus infinity; an expanded parameter, an expanded and a transposed buffer; batch norm."""

    mask: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((CLASSES, CLASSES), float("-inf")).triu(1))
        self.register_buffer("scale", torch.ones(1).expand(CLASSES))
        self.register_buffer("turned", torch.rand(2, 3).T)
        self.shared = nn.Parameter(torch.zeros(1).expand(CLASSES))
        self.norm = nn.BatchNorm1d(CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        """Scores, [n, 3], mixed by an attention of the classes."""
        scores: Tensor = self.norm(super().forward(inputs)) * self.scale + self.shared
        return scores @ self.mask.softmax(dim=1).T


class Growing(Plain):
    """It keeps all inputs in a buffer."""

    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(0, FEATURES))

    def forward(self, inputs: Tensor) -> Tensor:
        """Scores, [n, 3]."""
        if self.training:
            self.cache = torch.cat([self.cache, inputs.detach()])
        return super().forward(inputs)


class Counted(nn.Linear):
    """A layer with a state that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        """Kept in the state_dict."""
        return {"calls": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Of the state_dict."""


def on_meta() -> nn.Module:
    """A model without values."""
    with torch.device("meta"):
        return Plain()


def with_tensor(dtype: torch.dtype, *, value: float = 0.0, trained: bool = False) -> nn.Module:
    """A model with one more parameter."""
    model = Plain()
    model.more = nn.Parameter(torch.full((2,), value).to(dtype), requires_grad=trained)
    return model


def long_name() -> nn.Module:
    """A parameter's name has more than 600 characters."""
    model = nn.Sequential()
    model.add_module("n" * 600, Plain())
    return model


MODELS: dict[str, Callable[[], object]] = {
    "plain": Plain,
    "counted": lambda: nn.Sequential(Counted(FEATURES, CLASSES)),
    "lazy": lambda: nn.Sequential(nn.LazyLinear(CLASSES)),
    "meta": on_meta,
    "float8": lambda: with_tensor(torch.float8_e4m3fn),
    "infinite": lambda: with_tensor(torch.float32, value=float("inf"), trained=True),
    "function": lambda: lambda inputs: inputs[:, :CLASSES],
    "none": lambda: None,
    "class": lambda: Plain,
    "dict": dict,
    "long_name": long_name,
    "wide": lambda: nn.Sequential(nn.Linear(FEATURES, 1 << 16), nn.ReLU(), nn.Linear(1 << 16, CLASSES)),
}


class Odd(Classifier):
    """Three classes of four features. The model is one of MODELS."""

    def __init__(self, kind: str = "plain") -> None:
        self._kind = kind

    def model(self) -> nn.Module:
        """Not always a module."""
        return MODELS[self._kind]()  # type: ignore[return-value] # that is what is tested

    def train_data(self, shard: Shard) -> Examples:
        """32 examples."""
        return shard.of(_examples(1, 32))

    def eval_data(self, shard: Shard | None = None) -> Examples:
        """40 examples for the coordinator."""
        return _examples(2, 40 if shard is None else 0)


class Kept(Odd):
    """It makes its model once, when it is made itself."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self._kept = Constants()

    def model(self) -> nn.Module:
        """Always the same module."""
        return self._kept


class Grown(Odd):
    """Its model changes the shape of a buffer."""

    def model(self) -> nn.Module:
        """A new module."""
        return Growing()


def _examples(seed: int, count: int) -> Examples:
    inputs = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(seed))
    return Examples(inputs, inputs[:, :CLASSES].argmax(dim=1))
