"""Local steps by an optimizer of torch, and the optimizer's state before and after them.

A state is kept in one of two forms. A device keeps it as the class has it, step counts included, so that its next round
goes on as if it had not been interrupted. The server averages tensors with the layout of the parameters. Adam's moments
are sent bias-corrected, m / (1 - beta^t), and a client that starts from them counts its steps from 2^24 on, where the
correction is 1: so an average of moments needs no step count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from algorithms.optimizers.classes import Known, averaged_symbols, make_optimizers
from algorithms.optimizers.spec import PREFIX, OptimizerSpec
from algorithms.parameters import AlgorithmError

_Tensors = dict[str, Tensor]
_Memory = Mapping[str, _Tensors]

_NUMBER = "number."
"""Marks the symbol of values that the class keeps as numbers of Python."""
_MANY_STEPS = float(2**24)
"""Step count at which a bias correction is 1; float32 counts no further."""
NON_NEGATIVE = frozenset({f"{PREFIX}exp_avg_sq", f"{PREFIX}square_avg"})
"""Averages of squares."""


@dataclass(frozen=True, slots=True)
class LocalOptimizer:
    """The optimizer of a client's steps in one round."""

    spec: OptimizerSpec
    known: Known = field(default_factory=dict)
    """Classes of other packages that may be used here."""
    start: _Memory = field(default_factory=dict)
    """The state to start from, in the form of `spec.state`; empty: a fresh one."""

    def begin(self, y: _Tensors, model: nn.Module | None = None) -> OptimizerSteps:
        """Its steps on these parameters, which they change in place. Tensors of other parameters are not read.

        model: the module with these parameters, as in `make_optimizers`.

        Raises:
            AlgorithmError: the optimizer is unknown here.
            ValueError: the state does not fit the parameters.
        """
        return OptimizerSteps(self, y, model)

    def private(self) -> LocalOptimizer:
        """The same for parameters that no server sees: what it would average starts anew."""
        return self if self.spec.state != "server" else replace(self, spec=replace(self.spec, state="fresh"), start={})


class OptimizerSteps:
    """Steps of one optimizer on the parameters of one model."""

    def __init__(self, local: LocalOptimizer, y: _Tensors, model: nn.Module | None) -> None:
        self._spec, self._y = local.spec, y
        self._parts = make_optimizers(local.spec, y, local.known, model)
        start = {symbol: _of(tensors, y) for symbol, tensors in local.start.items()}
        if any(start.values()):
            check_state(start, y)
            load = self._load_averaged if local.spec.state == "server" else self._load
            for optimizer, part, _ in self._parts:
                load(optimizer, part, start)

    def step(self, d: _Tensors, rate: float) -> None:
        """One step with d in place of the gradient. rate: the learning rate."""
        for name, tensor in self._y.items():
            tensor.grad = d[name]
        for part in self._parts:
            for group in part.optimizer.param_groups:
                group["lr"] = rate * part.rate_ratio
            part.optimizer.step()
        for tensor in self._y.values():
            tensor.grad = None

    def memory(self) -> dict[str, _Tensors]:
        """The state after the steps in the form of `spec.state`, by symbols with PREFIX; empty if it is not kept.

        Raises AlgorithmError if the class keeps values that are neither tensors nor numbers.
        """
        if self._spec.state == "fresh":
            return {}
        if self._spec.state == "server":
            return self._averaged()
        memory: dict[str, _Tensors] = {}
        for optimizer, part, _ in self._parts:
            for name, tensor in part.items():
                for key, value in optimizer.state[tensor].items():
                    if value is not None:
                        number, kept = self._kept(key, value)
                        memory.setdefault(f"{PREFIX}{number}{key}", {})[name] = kept
        return memory

    def _kept(self, key: object, value: object) -> tuple[str, Tensor]:
        if isinstance(value, Tensor):
            return "", value
        if not isinstance(value, int | float):
            raise AlgorithmError(
                f"{self._spec.name}: expected a state of tensors and numbers with state = device, got "
                f"{type(value).__name__} as {key}; choose state = fresh"
            )
        return _NUMBER, torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)

    def _load(self, optimizer: Optimizer, part: _Tensors, start: _Memory) -> None:
        for symbol, tensors in start.items():
            key = symbol.removeprefix(PREFIX)
            for name in tensors.keys() & part.keys():
                value: Any = tensors[name]
                if key.startswith(_NUMBER):
                    value = value.item()
                elif value.dim():
                    value = value.to(part[name].device, copy=True)
                else:
                    value = value.to("cpu", copy=True)  # torch's step counts are on the CPU
                optimizer.state[part[name]][key.removeprefix(_NUMBER)] = value

    def _load_averaged(self, optimizer: Optimizer, part: _Tensors, start: _Memory) -> None:
        for name, tensor in part.items():
            state = optimizer.state[tensor]
            if not isinstance(optimizer, torch.optim.Muon):
                state["step"] = torch.tensor(_MANY_STEPS)
            for symbol in averaged_symbols(self._spec):
                if (key := _key_of(optimizer, symbol)) is not None:
                    state[key] = start[f"{PREFIX}{symbol}"][name].to(tensor.device, tensor.dtype, copy=True)

    def _averaged(self) -> dict[str, _Tensors]:
        """Tensors for an average, each with the layout of all parameters."""
        averaged: dict[str, _Tensors] = {}
        for symbol, beta in averaged_symbols(self._spec).items():
            values = averaged[f"{PREFIX}{symbol}"] = dict.fromkeys(self._y, torch.empty(0))
            for optimizer, part, _ in self._parts:
                key = _key_of(optimizer, symbol)
                for name, tensor in part.items():
                    values[name] = _corrected(optimizer.state[tensor], key, beta, tensor)
        return averaged


def check_state(state: _Memory, y: _Tensors) -> None:
    """Raises ValueError if a state has tensors of other parameters, or larger ones."""
    for symbol, tensors in state.items():
        for name, tensor in tensors.items():
            if name not in y or tensor.numel() > max(1, y[name].numel()):
                raise ValueError(
                    f"state of the optimizer, {symbol}: expected tensors of this model's parameters, got {name!r} of "
                    f"shape {tuple(tensor.shape)}"
                )


def _of(tensors: _Tensors, y: _Tensors) -> _Tensors:
    return {name: tensor for name, tensor in tensors.items() if name in y}


def _key_of(optimizer: Optimizer, symbol: str) -> str | None:
    """The class's own key of an averaged tensor; None if it has none. Muon's momentum is averaged as exp_avg."""
    if isinstance(optimizer, torch.optim.Muon):
        return "momentum_buffer" if symbol == "exp_avg" else None
    return symbol


def _corrected(state: Mapping[str, Any], key: str | None, beta: float, like: Tensor) -> Tensor:
    """A moment divided by 1 - beta^t; zeros where the class has none."""
    value: Tensor | None = None if key is None else state.get(key)
    if value is None:
        return torch.zeros_like(like)
    if not beta or key == "momentum_buffer":
        return value.clone()
    corrected: Tensor = value / (1.0 - beta ** float(state["step"]))
    return corrected
