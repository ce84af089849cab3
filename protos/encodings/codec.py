"""Encodes bundles and decodes them, whole or a range of one tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from protos.buffers import zeros
from protos.codec import check_tensors, unpack
from protos.encodings.encoded_layout import EncodedLayout
from protos.encodings.random_words import RandomWords
from protos.encodings.scheme import Bytes, EncodingError, Scheme, Words, arithmetic_type
from protos.layout import Entry, Layout

Read = Callable[[int, int], bytes | bytearray | memoryview]
"""(offset, nbytes) -> these encoded bytes."""

_TILE = 1 << 17
"""Values that are encoded or decoded at a time. Their intermediate results fit in a core's cache."""


def encode(tensors: Mapping[str, Tensor], encoded: EncodedLayout, key: bytes) -> memoryview:
    """Encode tensors into a new buffer of `encoded.size_bytes` bytes. They may have any device and strides.

    Args:
        tensors: as in `encoded.layout`. Their order does not matter.
        encoded: the layout and the encoding.
        key: from `encoding_key`. Equal arguments give equal bytes on machines whose processors add in the same order.

    Raises:
        LayoutError: the tensors do not match the layout.
        EncodingError: a value that is to be encoded is not finite, or would not be after decoding.
    """
    check_tensors(tensors, encoded.layout)
    words = RandomWords(key)
    buffer = zeros(encoded.size_bytes)
    for name, target in unpack(buffer, encoded.plain_part).items():
        target.copy_(tensors[name].detach())
    whole = np.frombuffer(buffer, np.uint8)
    for number, entry, section, scheme in encoded.encoded_entries():
        raw = whole[section.offset : section.offset + section.nbytes]
        flat = tensors[entry.name].detach().cpu().reshape(-1)
        try:
            _encode_tensor(flat, raw, scheme, _WordsOf(words, number))
        except EncodingError as error:
            raise EncodingError(f"tensor {entry.name!r}: {error}") from None
    return buffer


def decode(buffer: bytes | bytearray | memoryview, encoded: EncodedLayout, key: bytes) -> dict[str, Tensor]:
    """The tensors of an encoded bundle, on the CPU, in memory of their own.

    Raises:
        LayoutError: the buffer does not have the layout's size, or a bool tensor has a byte other than 0 and 1.
        EncodingError: bytes that `encode` never writes.
    """
    view = memoryview(buffer).cast("B")
    plain = unpack(view, encoded.plain_part)
    # One allocation in large pages: the kernel needs longer for small pages than the decoding.
    tensors = unpack(zeros(encoded.layout.size_bytes), encoded.layout)
    for name, tensor in plain.items():
        tensors[name].copy_(tensor)
    words = RandomWords(key)
    for number, entry, section, scheme in encoded.encoded_entries():
        blocks = _Blocks(entry, section.offset, scheme, _WordsOf(words, number))
        blocks.decode(_reader(view), 0, tensors[entry.name].view(-1))
    return tensors


def decode_range(  # noqa: PLR0913, PLR0917 - a range of one tensor, and what decoding needs
    read: Read, encoded: EncodedLayout, number: int, start: int, count: int, key: bytes
) -> Tensor:
    """The values [start, start + count) of one tensor in C order, with the bits that `decode` gives. Own memory.

    Args:
        read: called with offset and size of the bytes of the blocks that cover the range, in pieces of some 100 KiB.
        encoded: the layout and the encoding.
        number: the tensor's position in the layout.
        start: the first value.
        count: the number of values.
        key: as for `encode`.

    Raises:
        ValueError: the tensor does not have this range.
        EncodingError: bytes that `encode` never writes, or `read` returned another number of bytes.
        LayoutError: a bool tensor has a byte other than 0 and 1.
    """
    entry, section = encoded.layout.entries[number], encoded.sections[number]
    if start < 0 or count < 0 or start + count > entry.numel:
        raise ValueError(
            f"tensor {entry.name!r}: expected a range within {entry.numel} values, got {count} values from {start}"
        )
    scheme = encoded.scheme(number)
    if count == 0:
        return torch.empty(0, dtype=entry.dtype)
    if scheme is None:
        return _plain_range(read, replace(entry, offset=section.offset), start, count)
    first, last = start // scheme.block, -(-(start + count) // scheme.block)
    begin, end = first * scheme.block, min(last * scheme.block, entry.numel)
    decoded = torch.empty(end - begin, dtype=entry.dtype)
    _Blocks(entry, section.offset, scheme, _WordsOf(RandomWords(key), number)).decode(read, first, decoded)
    return decoded[start - begin :][:count]


def _plain_range(read: Read, entry: Entry, start: int, count: int) -> Tensor:
    nbytes = count * entry.dtype.itemsize
    raw = bytearray(_exactly(read, entry.offset + start * entry.dtype.itemsize, nbytes))
    part = replace(entry, shape=(count,), offset=0)
    return unpack(raw, Layout((part,), nbytes))[entry.name]


def _reader(view: memoryview) -> Read:
    return lambda offset, nbytes: view[offset : offset + nbytes]


def _exactly(read: Read, offset: int, nbytes: int) -> bytes | bytearray | memoryview:
    raw = read(offset, nbytes)
    if (came := memoryview(raw).nbytes) != nbytes:
        raise EncodingError(f"expected {nbytes} bytes at offset {offset}, got {came}")
    return raw


@dataclass(frozen=True, slots=True)
class _WordsOf:
    """The random words of one tensor."""

    words: RandomWords
    tensor: int

    def blocks(self, first: int, count: int, words: int) -> Words:
        """[count, words]: the words of `count` blocks."""
        if not words:
            return np.empty((count, 0), np.uint64)
        self.words.seek(self.tensor, first * words)
        return self.words.take(count * words).reshape(count, words)


def _tiles(numel: int, block: int, first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """(first block, blocks, values of each) of successive tiles of the blocks [first, last) of a tensor."""
    full = min(last, numel // block)
    step = max(1, _TILE // block)
    for at in range(first, full, step):
        yield at, min(step, full - at), block
    if last > full:
        yield full, 1, numel - full * block


def _encode_tensor(flat: Tensor, raw: Bytes, scheme: Scheme, words: _WordsOf) -> None:
    """Write the bytes of one tensor. flat: its values. raw: its section."""
    kind = torch.float64 if flat.dtype == torch.float64 else torch.float32
    numel = flat.numel()
    for first, count, tile in _tiles(numel, scheme.block, 0, -(-numel // scheme.block)):
        begin, size = first * scheme.block, scheme.nbytes(tile)
        values = flat[begin : begin + count * tile].to(kind).view(count, tile).numpy()
        offset = first * scheme.nbytes(scheme.block)
        blocks = raw[offset : offset + count * size].reshape(count, size)
        scheme.encode(values, blocks, words.blocks(first, count, scheme.words))


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The blocks of one encoded tensor."""

    entry: Entry
    offset: int
    scheme: Scheme
    words: _WordsOf

    def decode(self, read: Read, first: int, decoded: Tensor) -> None:
        """Decode the blocks from the block `first` on into `decoded`, which ends with one of them."""
        block = self.scheme.block
        last = first + -(-len(decoded) // block)
        for at, count, tile in _tiles(self.entry.numel, block, first, last):
            size = self.scheme.nbytes(tile)
            raw = _exactly(read, self.offset + at * self.scheme.nbytes(block), count * size)
            target = decoded[(at - first) * block :][: count * tile].view(count, tile)
            try:
                self._decode_tile(np.frombuffer(raw, np.uint8).reshape(count, size), target, at)
            except EncodingError as error:
                raise EncodingError(f"tensor {self.entry.name!r}: {error}") from None

    def _decode_tile(self, blocks: Bytes, target: Tensor, first: int) -> None:
        words = self.words.blocks(first, len(blocks), self.scheme.words)
        if target.dtype in (torch.float32, torch.float64):
            self.scheme.decode(blocks, target.numpy(), words)
            return
        values = np.empty(target.shape, arithmetic_type(target.dtype))
        self.scheme.decode(blocks, values, words)
        target.copy_(torch.from_numpy(values))
