"""Registers and reports failures of a thousand characters, again and again: each could be a log line."""

from __future__ import annotations

from itertools import count
from typing import Any

import grpc

from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import coordinator_pb2_grpc, training_pb2
from tests.hostile.target import Target, Until

STEERING = "\x1b[2J\r\n\u202e\x9b"
"""Clears a terminal, starts a false line, and reverses the direction of the rest."""
FAILURES = 64
_CALL_S = 20.0


def attack(target: Target, until: Until) -> None:
    """Register and report until the end; refusals are expected."""
    with target.channel() as channel:
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        for number in count():
            if until():
                return
            try:
                session_id = stub.Register(registration(target.name, number), timeout=_CALL_S).session_id
                stub.ReportStatus(report(session_id, f"no-run-{number}", number), timeout=_CALL_S)
            except grpc.RpcError:
                continue


def registration(name: str, number: int) -> pb.RegisterRequest:
    """A new process each time, with texts that attack a terminal."""
    return pb.RegisterRequest(
        client_id=name,
        instance_id=f"{number}{STEERING}",
        protocol=pb.ProtocolRange(min=1, max=1),
        tasks=[pb.TaskOffer(name="none")],
        software=STEERING,
        labels={"site": STEERING},
    )


def report(session_id: str, run_id: str, number: int) -> Any:
    """A report with the largest number of failures, each with a different text of a thousand characters."""
    failures = [
        pb.WorkFailure(
            key=training_pb2.ExchangeKey(run_id=run_id, round=index),
            reason=pb.FAILURE_REASON_RESOURCES,
            message=(STEERING + f"{number} ") * 100,
        )
        for index in range(FAILURES)
    ]
    return pb.ReportStatusRequest(session_id=session_id, failures=failures)
