"""What the page states about a coordinator that does not answer. The texts are those of the grpc version in use."""

from __future__ import annotations

import grpc.aio
import pytest

from fl_web.coordinator.calls import Calls, Unreachable
from protos.fl.v1 import admin_pb2 as pb


@pytest.mark.parametrize(
    ("target", "shown"), [("127.0.0.1:1", "127.0.0.1:1"), ("unix:/nowhere/socket", "/nowhere/socket")]
)
async def test_a_place_where_nothing_listens_is_named(target: str, shown: str) -> None:
    """In place of gRPC's text about its own parts."""
    async with grpc.aio.insecure_channel(target) as channel:
        with pytest.raises(Unreachable) as error:
            await Calls(channel).call(pb.WhoAmIRequest(), pb.WhoAmIResponse)
    assert str(error.value) == f"nothing listens at {shown}"
