"""Slow links delay no other client and lose nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator

import grpc
import pytest

from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import errors_pb2
from tests.processes.federation import Coordinator
from tests.processes.process import Workspace
from tests.processes.raw_client import RawClient, Update, detail, messages


def slowly(update: Update) -> Iterator[pb.SubmitUpdateRequest]:
    """Send a byte every 50 ms, which takes much longer than the stall timeout in total."""
    for message in messages(update, 1):
        yield message
        time.sleep(0.05)


@pytest.mark.slow
def test_a_stalled_upload_is_ended_and_resumed(workspace: Workspace) -> None:
    """It gets a retry time and resumes from the received bytes. The other client's update is accepted at once."""
    server = Coordinator(workspace, settings={"limits": {"stall_s": 2.0}}).serve()
    with RawClient(server.address, "slow") as slow, RawClient(server.address, "quick") as quick:
        events = []
        for client in (slow, quick):
            client.register()
            events.append(client.attend())
        server.create("trickle", round={"clients_per_round": 2, "min_clients": 2}, stop={"rounds": 1})
        update, other = [
            client.update(next(each).assignment) for client, each in zip((slow, quick), events, strict=True)
        ]
        ending = slow.stub.SubmitUpdate.future(slowly(update), timeout=60)
        assert quick.submit(other).admitted
        with pytest.raises(grpc.RpcError, match="less than a chunk of") as ended:
            ending.result()
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert isinstance(detail(ended.value), errors_pb2.RetryLater)
        kept = slow.query(update).kept_bytes
        assert 0 < kept < len(update.data)
        update.header.resume_offset = kept
        assert slow.submit(update).admitted
        assert len(server.digests("trickle")) == 1
