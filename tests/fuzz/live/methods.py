"""The methods that a live coordinator serves, with valid requests and with the port that serves them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from protos.fl.v1 import admin_pb2, coordinator_pb2, enrollment_pb2
from tests.fuzz.examples import examples, upload_parts
from tests.fuzz.mutation import Seed, Stream
from tests.fuzz.parsers.handlers import is_served

CLIENTS, OPERATORS, PROBES, DEVICES = "listen", "admin_listen", "health_listen", "enroll_listen"
"""Ports, by the names of their settings."""
FIRST_ONLY = frozenset({"Attend", "WatchHistory", "WatchRun", "Watch"})
"""Streams without an end: the fuzzer takes the first response and hangs up."""


@dataclass(frozen=True, slots=True)
class Method:
    """A method on a port."""

    path: str
    port: str
    seeds: Sequence[Seed]
    """A request, or a stream of them."""
    streams_in: bool
    streams_out: bool

    @property
    def name(self) -> str:
        """Without its service."""
        return self.path.rpartition("/")[2]


def served() -> list[Method]:
    """All methods of all services, on each port that serves them."""
    found = [*_of(coordinator_pb2, CLIENTS), *_of(admin_pb2, OPERATORS)]
    found += [replace(each, port=CLIENTS) if "Renew" in each.path else each for each in _of(enrollment_pb2, DEVICES)]
    for port in (CLIENTS, OPERATORS, PROBES):
        found += _of(health_pb2, port)
    for port in (CLIENTS, OPERATORS):
        found += _of(reflection_pb2, port)
    return found


def _of(module: Any, port: str) -> Iterator[Method]:
    for service in module.DESCRIPTOR.services_by_name.values():
        for method in filter(lambda each: is_served(each.name), service.methods):
            seeds: list[Seed] = [*examples(method.input_type)]
            if method.name == "SubmitUpdate":
                seeds = [Stream(upload_parts())]
            elif method.client_streaming:
                seeds = [Stream(list(examples(method.input_type)))]
            path = f"/{service.full_name}/{method.name}"
            yield Method(path, port, seeds, method.client_streaming, method.server_streaming)
