"""The model: a number of tensors with zeros. The server of the job imports this module."""

from __future__ import annotations

import torch
from torch import nn


class Constant(nn.Module):
    """`tensors` tensors with `size` numbers together. FLARE reads the arguments from attributes of the same names."""

    def __init__(self, size: int, tensors: int) -> None:
        super().__init__()
        self.size, self.tensors = size, tensors
        sizes = [size // tensors + (index < size % tensors) for index in range(tensors)]
        self.pieces = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])
