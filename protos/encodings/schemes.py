"""The scheme of each encoding."""

from __future__ import annotations

from functools import cache

import torch

from protos.encoding_spec import EncodingSpec
from protos.encodings.bfloat16 import BFloat16
from protos.encodings.eden import Eden
from protos.encodings.integers import Integers
from protos.encodings.scheme import Scheme
from protos.encodings.sparse import RandomK, TopK


@cache
def scheme_of(spec: EncodingSpec, dtype: torch.dtype) -> Scheme | None:
    """The scheme that writes tensors of a floating dtype; None for plain."""
    match spec.name:
        case "plain":
            return None
        case "bf16":
            return BFloat16(dtype)
        case "int8" | "int4" | "int2":
            return Integers(int(spec.name.removeprefix("int")), dtype)
        case "topk":
            return TopK(spec.fraction, dtype)
        case "randk":
            return RandomK(spec.fraction, dtype)
        case _:
            return Eden(int(spec.name.removeprefix("eden")), dtype)
