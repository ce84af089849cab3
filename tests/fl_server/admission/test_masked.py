"""A masked update is admitted by its size and digest, and its header tells nothing of the client's data."""

from __future__ import annotations

from typing import Any

import pytest

from fl_server.admission.client_rules import MaskedGate, UpdateRefused
from protos.codec import digest_message, digest_of
from protos.fl.v1.tensor_pb2 import Manifest
from protos.fl.v1.training_pb2 import Payload, PayloadKind, UpdateHeader

BYTES = 24


def header(**changed: Any) -> UpdateHeader:
    """What a device sends, with some fields changed."""
    payload = Payload(kind=PayloadKind.PAYLOAD_KIND_MASKED, manifest=Manifest(size_bytes=BYTES))
    fields = {"payloads": [payload], "size_bytes": BYTES, "num_examples": 1, "num_steps": 1}
    return UpdateHeader(**{**fields, "digest": digest_message(digest_of(b"update")), **changed})


def test_what_a_device_sends_is_taken() -> None:
    """One payload without tensors."""
    MaskedGate(BYTES).check_header(header())


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"num_examples": 31}, "expected 1 for the examples"),
        ({"num_steps": 4}, "expected 1 for the examples"),
        ({"training_loss": 0.5}, "expected 1 for the examples"),
        ({"size_bytes": BYTES + 1}, "expected 24 bytes, got 25"),
        ({"payloads": [Payload(kind=PayloadKind.PAYLOAD_KIND_DELTA)]}, "expected one payload of the kind MASKED"),
    ],
)
def test_a_header_that_tells_more_is_refused(changed: dict[str, Any], text: str) -> None:
    """Examples and steps are part of the sums."""
    with pytest.raises(UpdateRefused, match=text):
        MaskedGate(BYTES).check_header(header(**changed))
