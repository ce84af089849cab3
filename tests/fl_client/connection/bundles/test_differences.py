"""Bundles made of a held one and a difference. Whatever is wrong with it, the bundle itself is fetched."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from structlog.testing import capture_logs

from fl_client.connection.bundles.download import MAX_BROKEN
from fl_client.connection.link import MAX_FAILED_CALLS
from fl_client.errors import BrokenTransfer, FailedCall, ResourceGone, Unreachable, WorkFailed
from fl_server.aggregation.outgoing import Broadcast
from protos.codec import digest_message, digest_of
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.tensor_pb2 import (
    RESOURCE_KIND_DIRECTION,
    Digest,
    Resource,
)
from tests.fl_client.connection.bundles.serving import CHUNK, LAYOUTS, Device, digest_of_difference, sent, values


@pytest.mark.parametrize("model", ["plain", "bf16", "int8"])
async def test_a_device_that_holds_the_bundle_before_fetches_the_difference(model: str) -> None:
    """In each of several rounds; the bundles are those of whole fetches, and fewer bytes are received."""
    first = sent(0, None, model)
    second = sent(0.001, first, model)
    third = sent(0.002, second, model)
    device, other = Device(first, second, third), Device(third)
    assert await device.get(first.resource) == [values(first, model)]
    assert device.fetches() == [first.digest]
    device.bytes.clear()
    assert await device.get(second.resource) == [values(second, model)]
    assert await device.get(third.resource) == [values(third, model)] == await other.get(third.resource)
    assert device.fetches() == [digest_of_difference(second), digest_of_difference(third)]
    assert sum(device.bytes) < 2 * third.resource.size_bytes
    assert other.fetches() == [third.digest]


async def test_a_cut_difference_is_resumed() -> None:
    """At the chunk border below the bytes that came."""
    first = sent(0, None)
    second = sent(0.001, first)
    device = Device(first, second)
    await device.get(first.resource)
    device.fetches()
    messages, cuts = device.connection._messages, [2]

    def cut(digest: bytes, offset: int) -> list[bytes]:
        return messages(digest, offset)[: cuts.pop() if cuts else None]

    device.connection._messages = cut  # type: ignore[method-assign]
    assert await device.get(second.resource) == [values(second)]
    assert device.connection.fetched == [(digest_of_difference(second), offset) for offset in (0, CHUNK)]


def damaged(data: bytes) -> bytes:
    """The bytes with one that is different in the middle."""
    half = len(data) // 2
    return data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :]


def warnings_of(logs: Sequence[Any]) -> list[str]:
    """The reasons for which differences were not used."""
    return [line["reason"] for line in logs if (line["event"], line["log_level"]) == ("difference_not_used", "warning")]


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        pytest.param(damaged, "expected the bytes of the difference, got bytes of another digest", id="damaged"),
        pytest.param(lambda data: data[:-1], "expected a manifest of .* bytes without tensors", id="shorter"),
        pytest.param(lambda data: data + b"\0", "expected a manifest of .* bytes without tensors", id="longer"),
    ],
)
async def test_a_damaged_difference_is_not_used(broken: Callable[[bytes], bytes], reason: str) -> None:
    """Each chunk has the right checksum. The bundle is fetched, with a warning, and the next difference is used."""
    first = sent(0, None)
    second = sent(0.001, first)
    third = sent(0.002, second)
    device = Device(first, second, third)
    await device.get(first.resource)
    assert second.difference is not None
    device.connection.broken[second.difference.digest] = broken(bytes(second.difference.bundle))
    device.fetches()
    with capture_logs() as logs:
        assert await device.get(second.resource) == [values(second)]
    assert device.fetches() == [second.difference.digest, second.digest]
    [warning] = warnings_of(logs)
    assert re.search(reason, warning)
    assert await device.get(third.resource) == [values(third)]
    assert device.fetches() == [digest_of_difference(third)]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        pytest.param(None, "expected the difference to make the bundle, got bytes of another digest", id="other-base"),
        pytest.param(b"\x05\0\0\0abcde", "block 0: expected a DEFLATE stream", id="no-deflate"),
        pytest.param(b"\xff\xff\xff\xff", "block 0: expected bytes up to", id="no-block"),
    ],
)
async def test_a_wrong_difference_with_its_own_digest_is_not_used(data: bytes | None, reason: str) -> None:
    """The coordinator describes it as the one of the bundle. None: a difference to another base."""
    first = sent(0, None)
    second, other = sent(0.001, first), sent(0.001, sent(0.1, None))
    if data is None:
        assert other.difference is not None
        data = bytes(other.difference.bundle)
    resource = described(second, digest=digest_message(digest_of(data)), size_bytes=len(data))
    device = Device(first, second, other)
    device.connection.broken[digest_of(data)] = data
    await device.get(first.resource)
    device.fetches()
    with capture_logs() as logs:
        assert await device.get(resource) == [values(second)]
    assert device.fetches() == [digest_of(data), second.digest]
    [warning] = warnings_of(logs)
    assert re.search(reason, warning)


def described(broadcast: Broadcast, **changes: Any) -> Resource:
    """The resource with another description of its difference."""
    resource = Resource()
    resource.CopyFrom(broadcast.resource)
    for field, value in changes.items():
        if isinstance(value, Digest):
            getattr(resource.difference, field).CopyFrom(value)
        else:
            setattr(resource.difference, field, value)
    return resource


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"word_bytes": 3}, "expected words of 1, 2, 4 or 8 bytes, got 3"),
        ({"word_bytes": 0}, "expected words of 1, 2, 4 or 8 bytes, got 0"),
        ({"size_bytes": 0}, "expected a difference of 1 to [0-9]+ bytes, got 0"),
        ({"size_bytes": 1 << 60}, "expected a difference of 1 to [0-9]+ bytes, got 1152921504606846976"),
        ({"digest": Digest(value=b"short")}, "difference: expected digest algorithm BLAKE3_256"),
    ],
    ids=str,
)
async def test_an_unusable_description_is_not_followed(changes: dict[str, Any], reason: str) -> None:
    """No difference is fetched, and no memory is taken for one."""
    first = sent(0, None)
    second = sent(0.001, first)
    device = Device(first, second)
    await device.get(first.resource)
    device.fetches()
    with capture_logs() as logs:
        assert await device.get(described(second, **changes)) == [values(second)]
    assert device.fetches() == [second.digest]
    [warning] = warnings_of(logs)
    assert re.search(reason, warning)


async def test_a_size_that_the_model_does_not_have_is_named_as_ever() -> None:
    """The bundle is fetched, whose manifest shows what is different."""
    first = sent(0, None)
    second = sent(0.001, first)
    device = Device(first, second)
    await device.get(first.resource)
    resource = described(second)
    resource.size_bytes += 4
    assert await device.get(resource) == [values(second)]
    assert device.fetches() == [first.digest, second.digest]


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        pytest.param(ResourceGone("gone"), 1, id="gone"),
        pytest.param(WorkFailed(pb.FAILURE_REASON_RESOURCES, "3 streams in a row stalled"), 1, id="stalled"),
        pytest.param(FailedCall("INTERNAL"), MAX_FAILED_CALLS, id="failing"),
        pytest.param(BrokenTransfer("damaged"), MAX_BROKEN, id="broken"),
    ],
)
async def test_a_difference_that_cannot_be_fetched_is_given_up(error: Exception, tries: int) -> None:
    """A coordinator that was restarted no longer has it."""
    first = sent(0, None)
    second = sent(0.001, first)
    device = Device(first, second)
    await device.get(first.resource)
    device.connection.broken[digest_of_difference(second)] = error
    device.fetches()
    assert await device.get(second.resource) == [values(second)]
    assert device.fetches() == [digest_of_difference(second)] * tries + [second.digest]


async def test_only_bundles_that_may_be_bases_are_kept() -> None:
    """Without the setting a device holds the decoded bundle alone."""
    first = sent(0, None)
    second = sent(0.001, first)
    device = Device(first, second)
    plain = described(first)
    plain.is_base = False
    await device.get(plain)
    device.fetches()
    assert await device.get(second.resource) == [values(second)]
    assert device.fetches() == [second.digest]


async def test_a_base_is_released_with_the_assignment_after_its_own() -> None:
    """A device that took no part in a round fetches the next bundle."""
    first = sent(0, None)
    second = sent(0.001, first)
    other = sent(0.5, None, kind=RESOURCE_KIND_DIRECTION)
    device = Device(first, second, other)
    await device.get(first.resource)
    await device.get(other.resource)
    device.fetches()
    await device.get(second.resource)
    assert device.fetches() == [second.digest]


async def test_a_repeated_assignment_keeps_its_base_and_fetches_nothing() -> None:
    """An evaluation names the model of the round before it is trained on, and the next round's base stays."""
    first = sent(0, None)
    second = sent(0.001, first)
    device = Device(first, second)
    await device.get(first.resource)
    await device.get(first.resource)
    await device.get(second.resource)
    await device.get(second.resource)
    assert device.fetches() == [first.digest, digest_of_difference(second)]


async def test_model_and_direction_have_their_own_bases() -> None:
    """Each is made of the bundle of its kind, although the bytes are equal."""
    firsts = [sent(0, None, "plain", kind) for kind in LAYOUTS]
    seconds = [sent(0.001, before, "plain", kind) for before, kind in zip(firsts, LAYOUTS, strict=True)]
    assert firsts[0].digest == firsts[1].digest
    device = Device(*firsts, *seconds)
    await device.get(*(resource_.resource for resource_ in firsts))
    device.fetches()
    assert await device.get(*(second.resource for second in seconds)) == [values(second, "plain") for second in seconds]
    assert device.fetches() == [digest_of_difference(second) for second in seconds]


async def test_a_fetch_that_is_cut_off_keeps_its_base() -> None:
    """The assignment is sent again after the connection came back."""
    first = sent(0, None)
    second = sent(0.001, first)
    device = Device(first, second)
    await device.get(first.resource)
    device.connection.broken[digest_of_difference(second)] = Unreachable("cut")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(device.get(second.resource), 0.05)
    device.connection.broken.clear()
    device.fetches()
    assert await device.get(second.resource) == [values(second)]
    assert device.fetches() == [digest_of_difference(second)]
