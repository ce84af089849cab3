"""Messages with one field at an extreme each, made from the contract itself: a field that is added is tried too."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message

DEPTH = 4
"""Of messages inside messages; a Struct holds itself."""
MANY = 5000
"""Elements of a repeated field."""
_FLOATS = (math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, -0.0, -1.0)
_TEXTS = ("\x00", "../../etc/passwd", "\x1b[2J\x1b]0;x\x07", "\u202e\ud7ff\n", "subprocess:run", "x" * 100_000)
_VALUES: dict[int, tuple[Any, ...]] = {
    Field.TYPE_DOUBLE: _FLOATS,
    Field.TYPE_FLOAT: _FLOATS,
    Field.TYPE_INT64: (-(2**63), -1, 0, 2**60, 2**63 - 1),
    Field.TYPE_UINT64: (0, 1, 2**60, 2**64 - 1),
    Field.TYPE_FIXED64: (0, 2**64 - 1),
    Field.TYPE_INT32: (-(2**31), -1, 0, 2**31 - 1),
    Field.TYPE_UINT32: (0, 1, 2**31, 2**32 - 1),
    Field.TYPE_FIXED32: (0, 2**32 - 1),
    Field.TYPE_ENUM: (0, 99, 2**31 - 1, -1),
    Field.TYPE_BOOL: (False, True),
    Field.TYPE_STRING: _TEXTS,
    Field.TYPE_BYTES: (b"", b"\x00", bytes(31), bytes(33), bytes(100_000)),
}


def extremes(base: Message, depth: int = DEPTH) -> Iterator[Message]:
    """Copies of a message, each with one field somewhere in it absent, or at one of the extremes of its type."""
    for field in base.DESCRIPTOR.fields:
        yield _changed(base, field, lambda message, field: message.ClearField(field.name))
        if _is_map(field):
            yield from _of_map(base, field)
        elif field.type == Field.TYPE_MESSAGE:
            yield from _of_message(base, field, depth)
        else:
            for value in _VALUES[field.type]:
                yield _changed(base, field, lambda message, field, value=value: _set(message, field, value))


def _of_message(base: Message, field: Field, depth: int) -> Iterator[Message]:
    if field.is_repeated:
        yield _changed(base, field, lambda message, field: [getattr(message, field.name).add() for _ in range(MANY)])
    if not depth:
        return
    scratch = type(base)()
    scratch.CopyFrom(base)
    inner = getattr(scratch, field.name)
    start = (inner[0] if len(inner) else inner.add()) if field.is_repeated else inner
    for changed in extremes(start, depth - 1):
        yield _changed(base, field, lambda message, field, changed=changed: _put(message, field, changed))


def _of_map(base: Message, field: Field) -> Iterator[Message]:
    """Only the parameters of a method are a map: names of all lengths, and values of all kinds."""
    for name in _TEXTS:
        yield _changed(base, field, lambda message, field, name=name: getattr(message, field.name)[name])
    for value in _FLOATS:
        yield _changed(
            base, field, lambda m, field, value=value: setattr(getattr(m, field.name)["eta_g"], "number_value", value)
        )

    def nested(message: Message, field: Field) -> None:
        value = getattr(message, field.name)["eta_g"]
        for _ in range(40):
            value = value.list_value.values.add()

    def many(message: Message, field: Field) -> None:
        for number in range(MANY):
            getattr(message, field.name)[str(number)].number_value = 1.0

    yield _changed(base, field, nested)
    yield _changed(base, field, many)


def _changed(base: Message, field: Field, change: Any) -> Message:
    message = type(base)()
    message.CopyFrom(base)
    change(message, field)
    return message


def _set(message: Message, field: Field, value: Any) -> None:
    if field.is_repeated:
        getattr(message, field.name).extend([value] * (2 if isinstance(value, str | bytes) else MANY))
    else:
        setattr(message, field.name, value)


def _put(message: Message, field: Field, value: Message) -> None:
    target = getattr(message, field.name)
    if field.is_repeated:
        target.add().CopyFrom(value)
    else:
        target.CopyFrom(value)


def _is_map(field: Field) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry
