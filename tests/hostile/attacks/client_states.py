"""Endless reports of lost states, of failures of unassigned work, and of availability, and questions for outcomes."""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import cast

import grpc

from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import ExchangeKey
from tests.hostile.target import Target, Until
from tests.processes.certificates import credentials
from tests.processes.raw_client import RawClient

RUNS = 20
"""Guessed names of runs: the honest ones."""


def attack(target: Target, until: Until) -> None:
    """Register and attend with the largest number of pending keys, and send all kinds of reports."""
    keys = [ExchangeKey(run_id=f"honest-run-{number % RUNS}", round=number % 4) for number in range(1000)]
    with RawClient(target.listen, target.name, credentials(target.certificates)) as client:
        for turn in itertools.count():
            if until():
                return
            with suppress(grpc.RpcError):
                if turn % 10 == 0:
                    client.register(pending=keys)
                asked = pb.AttendRequest(session_id=client.session_id, pending=keys)
                next(client.stub.Attend(asked, timeout=10))  # a new stream ends the one before
                _report(client, turn)


_REASONS = (
    pb.FAILURE_REASON_STATE_LOST,
    pb.FAILURE_REASON_TASK_ERROR,
    cast(pb.FailureReason, 99),
    cast(pb.FailureReason, -1),
)


def _report(client: RawClient, turn: int) -> None:
    failures = [
        pb.WorkFailure(key=key, reason=reason, message=f"{turn} " + "x" * 2000)
        for key in (ExchangeKey(run_id=f"honest-run-{turn % RUNS}", round=round_) for round_ in range(4))
        for reason in _REASONS
    ]
    words = pb.Availability(
        may_train=turn % 2 == 0, reason=cast(pb.UnavailableReason, turn % 100), detail=f"{turn} " + "y" * 200
    )
    request = pb.ReportStatusRequest(session_id=client.session_id, availability=words, failures=failures)
    client.stub.ReportStatus(request, timeout=10)
