"""Differences of what is sent to what was sent before."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fl_server.aggregation.outgoing import Broadcast, Outgoing, in_encoding, make_broadcast
from fl_server.run_settings.config import RunConfig
from fl_server.run_settings.spec import from_values
from protos.codec import Layout, digest_message, digest_of
from protos.differences import apply_difference
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.tensor_pb2 import (
    ENCODING_PLAIN,
    RESOURCE_KIND_DIRECTION,
    RESOURCE_KIND_FROZEN,
    RESOURCE_KIND_MODEL,
    Manifest,
    ResourceKind,
)

VALUES = torch.randn(2000, generator=torch.Generator().manual_seed(1))
CHUNK = 1000


def config(**encodings: str) -> RunConfig:
    """A run with these encodings."""
    return from_values({"task": {"name": "digits"}, "encodings": encodings})


def outgoing(moved: float, round_: int, kind: ResourceKind = RESOURCE_KIND_MODEL, /, **encodings: str) -> Outgoing:
    """The bundle of a round, whose values have moved."""
    tensors = {"w": VALUES + moved, "steps": torch.tensor([round_])}
    plain = Outgoing(kind, tensors, Layout.of(tensors, trainable=["w"]))
    return in_encoding(plain, config(**{"difference": "previous", **encodings}), round_)


def sent(broadcast: Broadcast) -> bytes:
    """The bytes of all of its chunks."""
    messages = (pb.FetchModelResponse.FromString(broadcast.message(place)[0]) for place in broadcast.places(0)[1:])
    return b"".join(message.chunk.data for message in messages)


def pair(**encodings: str) -> tuple[Broadcast, Broadcast]:
    """The broadcasts of two rounds."""
    first = make_broadcast(outgoing(0, 0, **encodings), CHUNK)
    return first, make_broadcast(outgoing(1e-4, 1, **encodings), CHUNK, first)


@pytest.mark.parametrize("model", ["plain", "bf16", "int8", "int4", "int2"])
def test_a_broadcast_has_the_difference_to_the_one_before(model: str) -> None:
    """It is smaller, it makes the same bytes, and both broadcasts say that they may be bases."""
    first, second = pair(model=model)
    difference = second.difference
    assert difference is not None
    described = second.resource.difference
    assert (first.resource.HasField("difference"), first.difference) == (False, None)
    assert (first.resource.is_base, second.resource.is_base) == (True, True)
    assert described.base == first.resource.digest
    assert described.digest == difference.resource.digest == digest_message(digest_of(sent(difference)))
    assert described.size_bytes == len(sent(difference)) < second.resource.size_bytes
    into = bytearray(second.resource.size_bytes)
    apply_difference(sent(first), sent(difference), described.word_bytes, memoryview(into))
    assert into == sent(second)


@pytest.mark.parametrize(("model", "word"), [("plain", 4), ("bf16", 2), ("int8", 1), ("int4", 1), ("int2", 1)])
def test_words_have_the_size_of_most_values(model: str, word: int) -> None:
    """Of a plain bundle those of its float32 values, although it has an int64 too."""
    assert outgoing(0, 0, model=model).word == word


def test_the_header_of_a_difference_is_that_of_the_contract() -> None:
    """Kind, digest and size are its own; no tensors and no encoding."""
    _, second = pair(model="int8")
    assert second.difference is not None
    header = pb.FetchModelResponse.FromString(second.difference.message(0)[0]).header
    assert header.resource == second.difference.resource
    assert (header.resource.kind, header.resource.encoding) == (RESOURCE_KIND_MODEL, ENCODING_PLAIN)
    assert header.manifest == Manifest(size_bytes=header.resource.size_bytes, encoding=ENCODING_PLAIN)


def test_both_are_found_by_their_digests() -> None:
    """And no others."""
    first, second = pair()
    assert second.difference is not None
    assert second.named(second.digest) is second
    assert second.named(second.difference.digest) is second.difference
    assert second.named(first.digest) is None
    assert first.named(second.difference.digest) is None


def test_a_difference_does_not_keep_the_bundle_before_in_memory() -> None:
    """Of a chain of rounds only the latest bundle and its difference are held."""
    _, second = pair()
    third = make_broadcast(outgoing(2e-4, 2), CHUNK, second)
    assert third.difference is not None
    assert (third.difference.difference, third.named(second.digest)) == (None, None)


@pytest.mark.parametrize("encodings", [{}, {"model": "int8"}])
def test_equal_bytes_stay_the_same_broadcast(encodings: dict[str, str]) -> None:
    """A round that is prepared again still sends the difference to the round before."""
    _, second = pair(**encodings)
    assert make_broadcast(outgoing(1e-4, 1, **encodings), CHUNK, second) is second


def test_equal_bytes_with_another_key_are_another_broadcast() -> None:
    """A client needs the key of its round."""
    zeros = {"w": torch.zeros(5)}
    plain = Outgoing(RESOURCE_KIND_MODEL, zeros, Layout.of(zeros, trainable=["w"]))
    bundles = [in_encoding(plain, config(model="int8", difference="previous"), round_) for round_ in (0, 1)]
    first = make_broadcast(bundles[0], CHUNK)
    second = make_broadcast(bundles[1], CHUNK, first)
    assert first.digest == second.digest
    assert first.resource.encoding_key != second.resource.encoding_key == bundles[1].key


@pytest.mark.parametrize(
    ("kind", "encodings"),
    [
        (RESOURCE_KIND_MODEL, {"difference": "none"}),
        (RESOURCE_KIND_FROZEN, {}),
        (RESOURCE_KIND_DIRECTION, {"direction": "eden4"}),
    ],
)
def test_some_bundles_have_none(kind: ResourceKind, encodings: dict[str, str]) -> None:
    """Without the setting nothing is different; parts that never change and rotated values have none."""
    first = make_broadcast(outgoing(0, 0, kind, **encodings), CHUNK)
    second = make_broadcast(outgoing(1e-4, 1, kind, **encodings), CHUNK, first)
    assert (second.difference, second.resource.is_base) == (None, False)
    assert not second.resource.HasField("difference")


@pytest.mark.parametrize("other", ["values", "size"])
def test_a_bundle_without_a_smaller_difference_has_none(other: str) -> None:
    """Of values that have nothing in common with those before, and of another size; later ones may have one."""
    first = make_broadcast(outgoing(0, 0), CHUNK)
    changed = {"w": VALUES[:50]}
    if other == "values":
        noise = torch.randint(0, 256, (8000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
        changed = {"w": noise.view(torch.float32), "steps": torch.tensor([1])}
    bundle = replace(outgoing(0, 1), tensors=changed, layout=Layout.of(changed, trainable=["w"]))
    second = make_broadcast(bundle, CHUNK, first)
    assert (second.difference, second.resource.HasField("difference")) == (None, False)
    assert second.resource.is_base
