"""Counts the values of a request in its wire bytes, before protobuf builds an object for each of them.

An empty sub-message takes two bytes on the wire and fifty to two hundred in memory. The count stops at the limit, so it
never costs more than the largest allowed request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias, Union

from google.protobuf.descriptor import Descriptor, FieldDescriptor

MOST_NESTED = 64
"""Deepest nesting of messages, with map entries: twenty levels of a Struct."""
_FIXED = {1: 8, 5: 4}
"""Bytes of a value by its wire type."""
_WIDTHS = {
    **dict.fromkeys((FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_SFIXED64), 8),
    **dict.fromkeys((FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_SFIXED32), 4),
}
_TEXTS = frozenset({FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES})
_LONGEST_VARINT = 10

Nested: TypeAlias = Mapping[int, Union["Nested", int]]
"""By field number: the fields of a sub-message, or the fewest bytes of a value of a packed field. Texts and single
numbers are left out: each is one value."""


class Malformed(ValueError):
    """Bytes that are no valid message: truncated, or nested too deeply. The text has the reason."""


def nested_of(kind: Descriptor) -> Nested:
    """The nested fields of a message type, at any depth."""
    return _nested(kind, {})


def _nested(kind: Descriptor, known: dict[str, dict[int, Nested | int]]) -> dict[int, Nested | int]:
    if kind.full_name in known:
        return known[kind.full_name]
    found: dict[int, Nested | int] = {}
    known[kind.full_name] = found
    for field in kind.fields:
        if field.message_type is not None:
            found[field.number] = _nested(field.message_type, known)
        elif field.is_repeated and field.type not in _TEXTS:
            found[field.number] = _WIDTHS.get(field.type, 1)
    return found


def count_values(message: bytes, nested: Nested, most: int) -> int:
    """Values in a message, at any depth: fields, sub-messages, elements of packed fields.

    Args:
        message: the serialized message.
        nested: `nested_of` its type.
        most: the count stops at the first value above this.

    Raises:
        Malformed: it is truncated, has groups, or is nested more than MOST_NESTED deep.
    """
    count = at = 0
    end, fields = len(message), nested
    outside: list[tuple[int, Nested]] = []
    while count <= most:
        if at >= end:
            if not outside:
                break
            end, fields = outside.pop()
            continue
        count += 1
        # Nearly every key and size is one byte: a function call for each would double the cost.
        key = message[at]
        at += 1
        if key >= 0x80:
            key, at = _varint(message, at - 1, end)
        wire = key & 7
        if wire == 0:
            at = _varint(message, at, end)[1]
            continue
        if wire != 2:
            at = _within(at + _width(wire, at), end)
            continue
        size, at = _varint(message, at, end)
        inner, behind = fields.get(key >> 3), _within(at + size, end)
        if isinstance(inner, int):
            count += size // inner
        elif inner is not None and size:
            if len(outside) >= MOST_NESTED:
                raise Malformed(f"it is nested more than {MOST_NESTED} deep")
            outside.append((end, fields))
            end, fields = behind, inner
            continue
        at = behind
    return count


def _varint(message: bytes, at: int, end: int) -> tuple[int, int]:
    if at < end and message[at] < 0x80:
        return message[at], at + 1
    value = shift = 0
    for place in range(at, min(end, at + _LONGEST_VARINT)):
        byte = message[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place + 1
        shift += 7
    raise Malformed(f"it is truncated at byte {at}")


def _within(at: int, end: int) -> int:
    if at > end:
        raise Malformed(f"it ends at byte {end}, inside a field")
    return at


def _width(wire: int, at: int) -> int:
    if (width := _FIXED.get(wire)) is None:
        raise Malformed(f"it has a field of wire type {wire} at byte {at - 1}")
    return width
