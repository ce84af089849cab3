"""Reports without end: lost states and failures of work that the attacker never had, and words about itself."""

from __future__ import annotations

import itertools
from contextlib import suppress

import grpc

from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import ExchangeKey
from tests.hostile.certificates import credentials
from tests.hostile.target import Target, Until
from tests.integration.raw_client import RawClient

RUNS = 20
"""Runs whose names the attacker guesses: those of the tests' honest runs."""


def attack(target: Target, until: Until) -> None:
    """Register with as many pending keys as a call may have, then report all that can be reported."""
    keys = [ExchangeKey(run_id=f"honest-run-{number % RUNS}", round=number % 4) for number in range(1000)]
    with RawClient(target.listen, target.name, credentials(target.certificates)) as client:
        for turn in itertools.count():
            if until():
                return
            with suppress(grpc.RpcError):
                if turn % 10 == 0:
                    client.register(pending=keys)
                _report(client, turn)


def _report(client: RawClient, turn: int) -> None:
    failures = [
        pb.WorkFailure(key=key, reason=reason, message=f"{turn} " + "x" * 2000)
        for key in (ExchangeKey(run_id=f"honest-run-{turn % RUNS}", round=round_) for round_ in range(4))
        for reason in (pb.FAILURE_REASON_STATE_LOST, pb.FAILURE_REASON_TASK_ERROR, 99, -1)
    ]
    words = pb.Availability(may_train=turn % 2 == 0, reason=turn % 100, detail=f"{turn} " + "y" * 200)
    request = pb.ReportStatusRequest(session_id=client.session_id, availability=words, failures=failures)
    client.stub.ReportStatus(request, timeout=10)
