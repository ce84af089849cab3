"""Links that bring bytes, but too slowly: they hold nobody up, and lose nothing."""

from __future__ import annotations

import time

import grpc
import pytest

from protos.fl.v1 import errors_pb2
from protos.status import detail_of
from tests.integration.harness import Coordinator
from tests.integration.raw_client import RawClient, messages


def slowly(update):
    """A byte every hundredth of a second: some ten times as long as the coordinator's patience."""
    for message in messages(update, 1):
        yield message
        time.sleep(0.01)


def test_an_upload_that_trickles_is_ended_and_goes_on(place):
    """With a wait to keep, and from what came; meanwhile the other client's update is taken."""
    server = Coordinator(place, settings={"limits": {"stall_s": 0.5}}).serve()
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
        assert isinstance(detail_of(ended.value.trailing_metadata()), errors_pb2.RetryLater)
        kept = slow.query(update).kept_bytes
        assert 0 < kept < len(update.data)
        update.header.resume_offset = kept
        assert slow.submit(update).admitted
        assert len(server.digests("trickle")) == 1
