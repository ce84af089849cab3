"""A client daemon that lies in secure aggregation: in the first draw of a round its shares are of other secrets."""

from __future__ import annotations

import runpy
from collections.abc import Mapping

from fl_common.secure_aggregation.attempt import Attempt

_HONEST = Attempt._own_shares


def _lying(attempt: Attempt) -> Mapping[int, tuple[bytes, bytes]]:
    shares = _HONEST(attempt)
    if attempt.terms.place.draw:
        return shares
    return {holder: (_other(of_mask), _other(of_key)) for holder, (of_mask, of_key) in shares.items()}


def _other(share: bytes) -> bytes:
    return share[:-1] + bytes([share[-1] ^ 1])


if __name__ == "__main__":
    Attempt._own_shares = _lying  # type: ignore[method-assign, assignment]  # of this process
    runpy.run_module("fl_client", run_name="__main__")
