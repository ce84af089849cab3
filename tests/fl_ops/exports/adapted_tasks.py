"""Tasks whose models have frozen parameters: tied ones, and a model of the peft library."""

from __future__ import annotations

import importlib
from typing import cast

import torch
from torch import Tensor, nn

from tests.processes.tiny_task import CLASSES, FEATURES, Tiny


class TiedHead(nn.Module):
    """A frozen table that is also the weight of a head, with a trained layer and batch norm between."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(FEATURES, FEATURES, bias=False)
        self.between = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES))
        self.again = self.between[0]
        self.head = nn.Linear(FEATURES, FEATURES, bias=False)
        self.table.requires_grad_(requires_grad=False)
        self.head.weight = self.table.weight

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.head(self.between(self.table(inputs)))[:, :CLASSES]
        return output


def base() -> nn.Module:
    """A network of fixed values."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(FEATURES, 6), nn.ReLU(), nn.Linear(6, CLASSES))


class Tied(Tiny):
    """The model of TiedHead. Its frozen part has fixed values. factor: of these values."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self._factor = factor

    def model(self) -> nn.Module:
        model = TiedHead()
        model.table.weight.data = self._factor * torch.eye(FEATURES)
        return model


class Peft(Tiny):
    """LoRA by the peft library on the first layer of `base`. wrapped: as a PeftModel; otherwise injected."""

    def __init__(self, *, wrapped: bool = True) -> None:
        super().__init__()
        self._wrapped = wrapped

    def model(self) -> nn.Module:
        peft = importlib.import_module("peft")  # only where it is used: it takes seconds
        config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["0"], init_lora_weights=False)
        made = peft.get_peft_model(base(), config) if self._wrapped else peft.inject_adapter_in_model(config, base())
        return cast(nn.Module, made)
