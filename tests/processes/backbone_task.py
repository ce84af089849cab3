"""A task with a frozen backbone that each device reads from its own file, and trained adapters beside it."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.processes.tiny_task import CLASSES, FEATURES, Tiny


class Backbone(nn.Module):
    """One square matrix."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = inputs @ self.weight.T
        return output


class WithAdapter(nn.Module):
    """W x + B A x of a frozen W, folded into as many outputs as there are classes."""

    def __init__(self, backbone: Backbone, rank: int) -> None:
        super().__init__()
        self.backbone = backbone.requires_grad_(requires_grad=False)
        width = backbone.weight.shape[0]
        self.lora_A = nn.Linear(width, rank, bias=False)
        self.lora_B = nn.Linear(rank, width, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        width = self.backbone.weight.shape[0]
        wide = inputs.repeat(1, -(-width // FEATURES))[:, :width] / width**0.5
        output: Tensor = self.backbone(wide) + self.lora_B(self.lora_A(wide))
        used = width // CLASSES * CLASSES
        return output[:, :used].reshape(inputs.shape[0], -1, CLASSES).sum(dim=1)


class Adapted(Tiny):
    """The classes of Tiny, learned by adapters. backbone: a file of `write_backbone`. Other options as in Tiny.

    copied: the file's values are copied to memory. broken: the frozen part is drawn at random in every model().
    """

    def __init__(
        self,
        backbone: str,
        rank: int = 2,
        hold: str = "",
        kept: int = 0,
        *,
        copied: bool = False,
        broken: bool = False,
    ) -> None:
        super().__init__(hold=hold, kept=kept)
        self._file, self._rank, self._copied, self._broken = backbone, rank, copied, broken

    def model(self) -> nn.Module:
        # On the meta device, and then assigned: the values are pages of the file, and are never copied.
        values = load_file(self._file)
        with torch.device("meta"):
            backbone = Backbone(values["weight"].shape[0])
        if self._copied:
            backbone.to_empty(device="cpu")
        backbone.load_state_dict(values, assign=not self._copied)
        if self._broken:
            backbone.weight = nn.Parameter(torch.randn(values["weight"].shape))
        return WithAdapter(backbone, self._rank)

    def adapter_config(self) -> dict[str, object]:
        """In the format of peft."""
        return {"peft_type": "LORA", "r": self._rank, "lora_alpha": self._rank, "target_modules": ["backbone"]}


def write_backbone(path: Path, width: int, seed: int = 0) -> Path:
    """A file with a backbone of width * width numbers."""
    weight = torch.randn(width, width, generator=torch.Generator().manual_seed(seed))
    save_file({"weight": weight}, path)
    return path
