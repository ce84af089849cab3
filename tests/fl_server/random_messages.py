"""Random messages of the contract, made from their descriptors: extreme values and unknown enum numbers."""

from __future__ import annotations

import math
import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_INTEGERS: dict[int, tuple[int, ...]] = {
    FieldDescriptor.TYPE_UINT32: (0, 1, 2, 7, 2**31 - 1, 2**31, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 1, 2, 1 << 20, 2**53, 2**63 - 1, 2**63, 2**64 - 1),
    FieldDescriptor.TYPE_INT32: (0, 1, -1, 2**31 - 1, -(2**31)),
    FieldDescriptor.TYPE_INT64: (0, 1, -1, 10**9, 253_402_300_799, 2**63 - 1, -(2**63)),
    FieldDescriptor.TYPE_FIXED32: (0, 1, 2**32 - 1),
    FieldDescriptor.TYPE_FIXED64: (0, 1, 2**64 - 1),
    FieldDescriptor.TYPE_ENUM: (0, 1, 2, 4, 8, 9, 99, -1, 2**31 - 1, -(2**31)),
}
_FLOATS = (0.0, 1.0, -1.0, math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324)
_TEXTS = ("", "a", "r", "blake3", "\0", "\x1b[2J", "../../x", "é" * 300, "x" * 5000, "-1", "\u202e", "0" * 5000)
_BYTES = (b"", b"\0", b"\xff" * 32, b"\0" * 32, b"x" * 4096)
Field = Any
"""A FieldDescriptor: protobuf has two classes of that name, and its types disagree about them."""
MOST = 3
"""Entries of a repeated field."""


class MessageGenerator:
    """Fills messages at random; the same seed gives the same messages."""

    def __init__(self, seed: int, known: dict[str, Any]) -> None:
        """known: values that a field of that name takes half of the time."""
        self._chance = random.Random(seed)
        self._known = known

    def fill(self, message: Message, depth: int = 0) -> Message:
        """Set some of a message's fields, chosen at random."""
        for field in message.DESCRIPTOR.fields:
            if self._chance.random() < (0.25 if depth < 4 else 0.8):
                continue
            if field.is_repeated:
                self._repeat(message, field, depth)
            elif field.message_type is not None:
                self._part(getattr(message, field.name), field, depth)
            else:
                setattr(message, field.name, self._value(field))
        return message

    def _repeat(self, message: Message, field: Field, depth: int) -> None:
        here, kind = getattr(message, field.name), field.message_type
        for _ in range(self._chance.randrange(MOST + 1)):
            if kind is not None and kind.GetOptions().map_entry:
                key, value = self._value(kind.fields_by_name["key"]), kind.fields_by_name["value"]
                if value.message_type is not None:
                    self.fill(here[key], depth + 1)
                else:
                    here[key] = self._value(value)
            elif kind is not None:
                self._part(here.add(), field, depth)
            else:
                here.append(self._value(field))

    def _part(self, part: Message, field: Field, depth: int) -> None:
        part.SetInParent()
        if field.name in self._known and self._chance.random() < 0.5:
            part.CopyFrom(self._known[field.name])
        elif depth < 6:
            self.fill(part, depth + 1)

    def _value(self, field: Field) -> Any:
        in_map_entry = field.containing_type.GetOptions().map_entry
        known = self._known.get(field.name)
        if known is not None and not (in_map_entry or isinstance(known, Message)) and self._chance.random() < 0.5:
            return known
        if field.type in _INTEGERS:
            return self._chance.choice(_INTEGERS[field.type])
        if field.type == FieldDescriptor.TYPE_BOOL:
            return self._chance.random() < 0.5
        if field.type in {FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT}:
            return self._chance.choice(_FLOATS)
        return self._chance.choice(_BYTES if field.type == FieldDescriptor.TYPE_BYTES else _TEXTS)
