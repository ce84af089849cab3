"""Encodings by name: those of the contract. It needs no torch, which the code of `protos.encodings` needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, cast

from protos.fl.v1 import tensor_pb2
from protos.wire import payload_name

_SHORT = {"top_k": "topk", "random_k": "randk"}


def _name(member: str) -> str:
    name = member.removeprefix("ENCODING_").lower()
    return _SHORT.get(name, name)


ENCODINGS: Mapping[str, tensor_pb2.Encoding] = MappingProxyType(
    {_name(member): cast(tensor_pb2.Encoding, number) for member, number in tensor_pb2.Encoding.items() if number}
)
"""Name -> number on the wire."""
_NAMES = {number: name for name, number in ENCODINGS.items()}
SPARSE = ("topk", "randk")
"""Encodings that leave values out. The others keep every value."""
EDEN = tuple(name for name in ENCODINGS if name.startswith("eden"))
"""Encodings that rotate the values, in every round by other signs."""
if TYPE_CHECKING:
    Encoding = str
    Dense = str
else:  # the names of the contract as types of settings
    Encoding = Literal[tuple(ENCODINGS)]
    Dense = Literal[tuple(name for name in ENCODINGS if name not in SPARSE)]


@dataclass(frozen=True, slots=True)
class EncodingSpec:
    """The choice of an encoding.

    Raises:
        ValueError: the name is not one of ENCODINGS, or the fraction does not suit it.
    """

    name: str
    fraction: float = 0.0
    """The share of values that topk and randk send, 0 < fraction <= 1; 0 for all others."""

    def of_payload(self, payload: str) -> EncodingSpec:
        """The encoding of a payload of an update that has this one.

        PLAIN if the payload is NAMED, for it may have numbers that must not become 0, and with a sparse encoding unless
        it is the delta, for no other has error feedback.
        """
        return PLAIN if payload_name(payload) or (self.sparse and payload != "delta") else self

    @property
    def sparse(self) -> bool:
        """Whether it sends only a share of the values."""
        return self.name in SPARSE

    def __post_init__(self) -> None:
        if self.name not in ENCODINGS:
            raise ValueError(f"expected an encoding of {', '.join(ENCODINGS)}, got {self.name!r}")
        if self.sparse:
            if not 0 < self.fraction <= 1:
                raise ValueError(f"expected a fraction over 0 and up to 1 for {self.name}, got {self.fraction}")
        elif self.fraction:
            raise ValueError(f"expected no fraction for {self.name}, got {self.fraction}")

    @property
    def wire(self) -> tensor_pb2.Encoding:
        """The number on the wire. The fraction is not part of it."""
        return ENCODINGS[self.name]

    @staticmethod
    def from_wire(encoding: int, fraction: float = 0.0) -> EncodingSpec:
        """The spec of a number from the wire. Raises ValueError for an unknown number and as the constructor does."""
        name = _NAMES.get(encoding)  # type: ignore[call-overload]
        if name is None:
            numbers = ", ".join(f"{name} ({number})" for name, number in ENCODINGS.items())
            raise ValueError(f"expected an encoding of {numbers}, got number {encoding}")
        return EncodingSpec(name, fraction)

    def __str__(self) -> str:
        return f"{self.name} {self.fraction!r}" if self.fraction else self.name


PLAIN = EncodingSpec("plain")
