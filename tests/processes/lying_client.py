"""A client daemon that lies in secure aggregation, in the first draw of a round: `LIE=shares` or `LIE=numbers`.

Its shares are of other secrets, or its numbers are 128 times as long as the clip allows.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fl_common.secure_aggregation import member
from fl_common.secure_aggregation.attempt import Attempt
from fl_common.secure_aggregation.masks import Mask, masked
from fl_common.secure_aggregation.terms import Terms

_HONEST = Attempt._own_shares


def _lying(attempt: Attempt) -> Mapping[int, tuple[bytes, bytes]]:
    shares = _HONEST(attempt)
    if attempt.terms.place.draw:
        return shares
    return {holder: (_other(of_mask), _other(of_key)) for holder, (of_mask, of_key) in shares.items()}


def _other(share: bytes) -> bytes:
    return share[:-1] + bytes([share[-1] ^ 1])


def _too_long(terms: Terms, values: Any, scalars: Sequence[int], masks: Sequence[Mask]) -> Iterator[bytes]:
    numbers = values if terms.place.draw else np.full_like(values, 1 << 22)
    return masked(terms, numbers, scalars, masks)


if __name__ == "__main__":
    if os.environ["LIE"] == "shares":
        Attempt._own_shares = _lying  # type: ignore[method-assign, assignment]  # of this process
    else:
        member.masked = _too_long  # type: ignore[attr-defined]  # of this process
    runpy.run_module("fl_client", run_name="__main__")
