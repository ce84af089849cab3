"""Encoded layouts: the places of a bundle's tensors in its encoded bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest

from protos.digests import digest_of
from protos.encoding_spec import EncodingSpec
from protos.encodings.scheme import Scheme
from protos.encodings.schemes import scheme_of
from protos.fl.v1 import tensor_pb2
from protos.layout import Entry, Layout


@dataclass(frozen=True, slots=True)
class Section:
    """The bytes of one tensor in an encoded bundle. offset: bytes from the start."""

    offset: int
    nbytes: int


@dataclass(frozen=True)
class EncodedLayout:
    """The layout of a bundle in an encoding. Made by `of`.

    Trainable floating tensors with elements are encoded. All others have the bytes that they have in a plain bundle.
    Sections have the order of the layout, and each begins at the first multiple of its tensor's element size. Bytes
    between sections are zero.
    """

    layout: Layout
    """The bundle before it is encoded."""
    spec: EncodingSpec
    sections: tuple[Section, ...]
    """One for each entry of the layout."""
    size_bytes: int
    """Bytes of the encoded bundle."""

    @staticmethod
    def of(layout: Layout, spec: EncodingSpec) -> EncodedLayout:
        """The layout of a bundle in an encoding. Sizes depend on the two arguments only, never on values."""
        sections: list[Section] = []
        end = 0
        for entry in layout.entries:
            offset = -(-end // entry.dtype.itemsize) * entry.dtype.itemsize
            sections.append(Section(offset, _nbytes(entry, _scheme(entry, spec))))
            end = offset + sections[-1].nbytes
        return EncodedLayout(layout, spec, tuple(sections), end)

    def scheme(self, number: int) -> Scheme | None:
        """The scheme of the entry with this number; None if its bytes are plain."""
        return _scheme(self.layout.entries[number], self.spec)

    def encoded_entries(self) -> Iterator[tuple[int, Entry, Section, Scheme]]:
        """Number, entry, section and scheme of each entry that is encoded."""
        for number, (entry, section) in enumerate(zip(self.layout.entries, self.sections, strict=True)):
            if (scheme := self.scheme(number)) is not None:
                yield number, entry, section, scheme

    @cached_property
    def plain_part(self) -> Layout:
        """The entries whose bytes are plain, at their offsets in the encoded bundle."""
        entries = (
            replace(entry, offset=section.offset)
            for number, (entry, section) in enumerate(zip(self.layout.entries, self.sections, strict=True))
            if self.scheme(number) is None
        )
        return Layout(tuple(entries), self.size_bytes)

    def to_manifest(self) -> tensor_pb2.Manifest:
        """The encoded layout as a message. It does not have the fraction of a sparse encoding."""
        manifest = self.layout.to_manifest()
        for spec, section in zip(manifest.tensors, self.sections, strict=True):
            spec.offset = section.offset
        manifest.size_bytes = self.size_bytes
        manifest.encoding = self.spec.wire
        return manifest

    @cached_property
    def manifest(self) -> tensor_pb2.Manifest:
        """What `to_manifest` makes, made once: to compare with and to copy from, not to be changed."""
        return self.to_manifest()

    @property
    def table(self) -> bytes:
        """The table of contents, with which the digest begins.

        It is that of the layout, and unless the encoding is plain, a line such as "encoding int8" or
        "encoding topk 0.01", with the shortest decimal fraction that reads as the same float64.
        """
        return self.layout.table + (b"" if self.spec.name == "plain" else f"encoding {self.spec}\n".encode())

    def digest(self, buffer: bytes | bytearray | memoryview) -> bytes:
        """The bundle's name: BLAKE3-256 of its table of contents, followed by its bytes."""
        return digest_of(self.table, buffer)

    def difference_from(self, manifest: tensor_pb2.Manifest, max_bytes: int) -> str | None:
        """Description of the first difference of a received manifest from `to_manifest`; None if they are equal.

        The manifest is untrusted: nothing is allocated for what it names. A bundle over `max_bytes` differs too.
        """
        expected = self.manifest
        if manifest.encoding != expected.encoding:
            return f"expected encoding {self.spec.name} ({expected.encoding}), got number {manifest.encoding}"
        if manifest.size_bytes > max_bytes:
            return f"expected at most {max_bytes} bytes, got size_bytes {manifest.size_bytes}"
        for position, (mine, theirs) in enumerate(zip_longest(expected.tensors, manifest.tensors)):
            if difference := _spec_difference(position, mine, theirs):
                return difference
        if manifest.size_bytes != expected.size_bytes:
            return f"expected size_bytes {expected.size_bytes} for {self.spec}, got {manifest.size_bytes}"
        return None


_SHOWN_CHARS = 80


def _spec_difference(
    position: int, expected: tensor_pb2.TensorSpec | None, came: tensor_pb2.TensorSpec | None
) -> str | None:
    if expected is None or came is None:
        first = "no tensor" if expected is None else f"tensor {expected.name!r}"
        second = "none" if came is None else f"{came.name[:_SHOWN_CHARS]!r}"
        return f"expected {first} at position {position}, got {second}"
    if expected.name != came.name:
        return f"expected tensor {expected.name!r} at position {position}, got {came.name[:_SHOWN_CHARS]!r}"
    for field in ("dtype", "shape", "trainable", "offset"):
        mine, theirs = getattr(expected, field), getattr(came, field)
        if mine != theirs:
            return f"tensor {expected.name!r}: expected {field} {_shown(mine)}, got {_shown(theirs)}"
    return None


def _shown(value: object) -> str:
    return str(value)[:_SHOWN_CHARS]


def _scheme(entry: Entry, spec: EncodingSpec) -> Scheme | None:
    if not (entry.trainable and entry.dtype.is_floating_point and entry.numel):
        return None
    return scheme_of(spec, entry.dtype)


def _nbytes(entry: Entry, scheme: Scheme | None) -> int:
    if scheme is None:
        return entry.nbytes
    full, rest = divmod(entry.numel, scheme.block)
    return full * scheme.nbytes(scheme.block) + (scheme.nbytes(rest) if rest else 0)
