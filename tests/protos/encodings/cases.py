"""The encodings under test, and bundles for them."""

from __future__ import annotations

import torch
from torch import Tensor

from protos.encodings import ENCODINGS, EncodedLayout, EncodingSpec, decode, encode, encoding_key
from protos.layout import Layout

FRACTIONS = {"topk": 0.1, "randk": 0.1}
SPECS = {name: EncodingSpec(name, FRACTIONS.get(name, 0.0)) for name in ENCODINGS}
ENCODED = {name: spec for name, spec in SPECS.items() if name != "plain"}
STOCHASTIC = ("int8", "int4", "int2", "eden4", "eden2", "eden1", "randk")
INTEGERS = {"int8": 127, "int4": 7, "int2": 1}
"""Name -> largest level."""
EDEN = {"eden4": 0.00955, "eden2": 0.1175, "eden1": 0.3634}
"""Name -> distortion of the best levels for a normal variable of variance 1 (Max, 1960, and 1 - 2 / pi)."""
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
KEY = encoding_key(1, "update", 0, "delta")


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def mixed(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Trainable tensors, with buffers, integers, bools and empty tensors between them."""
    return {
        "flag": torch.tensor([True, False, True]),
        "weight": noise(70, 130, seed=1, dtype=dtype),
        "running_mean": noise(5, seed=2, dtype=dtype),
        "bias": noise(7, seed=3, dtype=dtype),
        "steps": torch.tensor(12),
        "none": torch.zeros(0, 4, dtype=dtype),
        "scale": noise(seed=4, dtype=dtype),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "kernel": noise(3, 3, 3, seed=5, dtype=dtype),
    }


TRAINABLE = ("weight", "bias", "none", "scale", "kernel")


def encoded_layout(tensors: dict[str, Tensor], spec: EncodingSpec) -> EncodedLayout:
    """All floating tensors are trainable, but for buffers."""
    return EncodedLayout.of(Layout.of(tensors, [name for name in tensors if name in TRAINABLE]), spec)


def one(values: Tensor, spec: EncodingSpec) -> EncodedLayout:
    """The layout of a bundle that has only the trainable tensor "weight"."""
    return EncodedLayout.of(Layout.of({"weight": values}, ["weight"]), spec)


def round_trip(values: Tensor, spec: EncodingSpec, key: bytes = KEY) -> Tensor:
    """One tensor, encoded and decoded."""
    encoded = one(values, spec)
    return decode(encode({"weight": values}, encoded, key), encoded, key)["weight"]
