"""Encoded updates in files: the values, sums and centres of the same updates decoded whole."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch

import algorithms as fl
from algorithms.reducers.robust import trimmed_mean
from fl_server.aggregation.reduction import average_buffers, centre_updates, sum_updates
from fl_server.aggregation.updates import (
    Decoding,
    EncodedUpdate,
    Source,
    UpdateKeys,
    UpdateShape,
    by_block,
    joined,
    neighbours,
)
from fl_server.store.errors import StoreError
from protos.codec import Layout, pack
from protos.encodings import ENCODINGS, EncodingError, EncodingSpec, decode, encode

SPECS = [EncodingSpec(name, 0.1 if name in {"topk", "randk"} else 0.0) for name in ENCODINGS if name != "plain"]
with_each_encoding = pytest.mark.parametrize("spec", SPECS, ids=str)
PAYLOADS: tuple[fl.Payload, ...] = ("delta", "own", "client_momentum")


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """Blocks of every size: full ones, partial ones, one value, none; and buffers between."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(70, 130, generator=draw),
        "b": torch.randn(3, generator=draw),
        "none": torch.empty(0, 2),
        "s": torch.randn((), generator=draw),
        "h": torch.randn(300, generator=draw).to(torch.bfloat16),
        "last": torch.randn(257, generator=draw),
        "mean": torch.randn(4, generator=draw),
        "count": torch.tensor(seed),
        "flag": torch.tensor([True]),
    }


TRAINED = ("w", "b", "none", "s", "h", "last")
LAYOUT = Layout.of(tensors(0), TRAINED)
TRAINABLE = Layout.of({name: tensors(0)[name] for name in TRAINED}, TRAINED)
WIDE = Layout.of({name: tensors(0)[name].double() for name in TRAINED}, TRAINED)


def shape_of(spec: EncodingSpec) -> UpdateShape:
    """Three payloads: the second has a name and stays plain, the third is in float64."""
    return UpdateShape.of(PAYLOADS, LAYOUT, TRAINABLE, {"client_momentum": WIDE}).encoded_as(spec)


def both(folder: Path, spec: EncodingSpec, count: int = 3) -> tuple[list[EncodedUpdate], list[Path]]:
    """The same updates, encoded and decoded, as files."""
    shape, encoded, decoded = shape_of(spec), [], []
    for number in range(count):
        keys, parts, plain = UpdateKeys(number, 0), [], []
        for payload in shape.payloads:
            whole = tensors(number)
            if payload.payload != "delta":
                whole = {name: whole[name] / 3 for name in TRAINED}
            if payload.payload == "client_momentum":
                whole = {name: tensor.double() for name, tensor in whole.items()}
            parts.append(bytes(encode(whole, payload.encoded, keys.of_payload(payload.payload))))
            values = decode(parts[-1], payload.encoded, keys.of_payload(payload.payload))
            plain.append(bytes(pack(values, payload.layout)))
        paths = folder / f"{number}.encoded", folder / f"{number}.plain"
        for path, data in zip(paths, (parts, plain), strict=True):
            path.write_bytes(b"".join(data))
        encoded.append(EncodedUpdate(paths[0], shape, Decoding(keys)))
        decoded.append(paths[1])
    return encoded, decoded


def same(one: fl.Tensors, other: fl.Tensors) -> None:
    """Equal names and bits."""
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) and tensor.dtype == other[name].dtype for name, tensor in one.items())


@with_each_encoding
def test_sums_have_the_bits_of_sums_over_decoded_updates(tmp_path: Path, spec: EncodingSpec) -> None:
    """Of both payloads and of the buffers; the file has the size that the shape states."""
    encoded, decoded = both(tmp_path, spec)
    assert encoded[0].path.stat().st_size == encoded[0].shape.size_bytes < decoded[0].stat().st_size
    sources: list[Source] = [*encoded]
    for payload in PAYLOADS:
        layout = encoded[0].shape.layout_of(payload)
        rows = [[0.5, 0.25, 0.25], [1.0, -2.0, 0.3]]
        for one, other in zip(sum_updates(sources, layout, rows), sum_updates([*decoded], layout, rows), strict=True):
            same(one, other)
    layout, weights = encoded[0].shape.layout_of("delta"), [0.5, 0.25, 0.25]
    same(average_buffers(sources, layout, weights), average_buffers([*decoded], layout, weights))


@with_each_encoding
def test_centres_have_the_bits_of_centres_over_decoded_updates(tmp_path: Path, spec: EncodingSpec) -> None:
    """Robust reducers read other blocks than the mean does."""
    encoded, decoded = both(tmp_path, spec)
    layout, scales = encoded[0].shape.layout_of("delta"), [[1.0, 0.5, 2.0]]
    reduce = partial(trimmed_mean, cut=1)
    [one], [other] = (centre_updates(sources, layout, scales, reduce) for sources in ([*encoded], [*decoded]))
    same(one, other)


@with_each_encoding
@pytest.mark.parametrize("block", [7, 256, 5000])
def test_any_blocks_have_the_same_values(tmp_path: Path, spec: EncodingSpec, block: int) -> None:
    """Of single tensors and of groups of neighbours, which blocks may begin and end in."""
    [encoded], [decoded] = both(tmp_path, spec, 1)
    for payload in PAYLOADS:
        for group in neighbours(encoded.shape.layout_of(payload).entries):
            entry, size = joined(group), block if joined(group).numel < 1000 or block > 200 else 997
            [one], [other] = (
                by_block([source], entry, lambda blocks: [next(iter(blocks))], size) for source in (encoded, decoded)
            )
            assert torch.equal(one, other), entry.name


def test_a_payload_with_a_name_is_plain() -> None:
    """It may be a second moment, which rounding could make 0 or negative."""
    encodings = [payload.encoding.name for payload in shape_of(EncodingSpec("int8")).payloads]
    assert encodings == ["int8", "plain", "int8"]


def test_a_file_that_is_gone_or_too_short_is_an_error(tmp_path: Path) -> None:
    """As for plain updates: the coordinator asks for the update again."""
    [encoded], _ = both(tmp_path, EncodingSpec("int8"), 1)
    entry = encoded.shape.layout_of("delta").entries[0]
    with encoded.path.open("r+b") as file:
        file.truncate(100)
    with pytest.raises(EncodingError, match="got 100"):
        encoded.read(entry, 0, entry.numel)
    encoded.path.unlink()
    with pytest.raises(StoreError, match="read the update"):
        encoded.read(entry, 0, entry.numel)


def test_a_read_decodes_only_the_blocks_that_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than the 256 values of one block, whatever the size of the update: memory does not grow with it."""
    [encoded], _ = both(tmp_path, EncodingSpec("int8"), 1)
    read: list[int] = []
    pread = os.pread

    def recorded(descriptor: int, size: int, offset: int) -> bytes:
        read.append(size)
        return pread(descriptor, size, offset)

    monkeypatch.setattr("fl_server.aggregation.updates.os.pread", recorded)
    entry = encoded.shape.layout_of("delta").entries[0]
    assert len(encoded.read(entry, 300, 10)) == 10
    assert read == [4 + 256]
