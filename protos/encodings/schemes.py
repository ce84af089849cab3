"""The scheme of each encoding."""

from __future__ import annotations

from functools import cache

import torch

from protos.encodings.bfloat16 import BFloat16
from protos.encodings.integers import Integers
from protos.encodings.scheme import Scheme
from protos.encodings.spec import EncodingSpec

_INTEGER_BITS = {"int8": 8, "int4": 4, "int2": 2}


@cache
def scheme_of(spec: EncodingSpec, dtype: torch.dtype) -> Scheme | None:
    """The scheme that writes tensors of a floating dtype; None for plain."""
    if spec.name == "bf16":
        return BFloat16(dtype)
    if bits := _INTEGER_BITS.get(spec.name):
        return Integers(bits, dtype)
    if spec.name == "plain":
        return None
    raise NotImplementedError(spec.name)
