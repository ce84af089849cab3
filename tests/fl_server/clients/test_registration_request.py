"""What a device says when it registers, before anything is kept of it."""

from __future__ import annotations

import pytest

from fl_server.clients.registration import check_sizes, held_resources
from fl_server.errors import InvalidInput
from protos.digests import digest_message, digest_of
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import tensor_pb2


def test_held_resources_are_digests() -> None:
    """A value that is no digest is refused, and so is a longer list than a daemon sends."""
    digest = digest_message(digest_of(b"model"))
    assert held_resources(pb.RegisterRequest(held=[digest])) == [digest.value]
    with pytest.raises(InvalidInput, match="held: expected digests"):
        held_resources(pb.RegisterRequest(held=[tensor_pb2.Digest(value=b"short")]))
    with pytest.raises(InvalidInput, match="held: expected 64 at most, got 65"):
        check_sizes(pb.RegisterRequest(held=[digest] * 65))
