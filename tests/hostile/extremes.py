"""Messages with one field at an extreme, generated from the contract, so that new fields are tested too."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeVar

from google.protobuf import descriptor
from google.protobuf.message import Message

M = TypeVar("M", bound=Message)

Field: Any = descriptor.FieldDescriptor
"""The C implementation has its own type."""
DEPTH = 4
"""Largest depth of nested messages; a Struct contains itself."""
MANY = 5000
"""Number of elements of a repeated field."""
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


def extremes(base: M, depth: int = DEPTH) -> Iterator[M]:
    """Copies of a message, each with one field absent or at an extreme of its type."""
    for field in base.DESCRIPTOR.fields:
        yield _changed(base, field, lambda message, field: message.ClearField(field.name))
        if _is_map(field):
            yield from _of_map(base, field)
        elif field.type == Field.TYPE_MESSAGE:
            yield from _of_message(base, field, depth)
        else:
            for value in _VALUES[field.type]:
                yield _changed(base, field, lambda message, field, value=value: _set(message, field, value))


def _of_message(base: M, field: Any, depth: int) -> Iterator[M]:
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


def _of_map(base: M, field: Any) -> Iterator[M]:
    """Names of all lengths, and values of all kinds: a method's parameters, or messages such as their schedules."""
    for name in _TEXTS:
        yield _changed(base, field, lambda message, field, name=name: getattr(message, field.name)[name])
    kind = field.message_type.fields_by_name["value"].message_type
    yield from _of_values(base, field) if kind.full_name == "google.protobuf.Value" else _of_messages(base, field)


def _of_messages(base: M, field: Any) -> Iterator[M]:
    scratch = type(base)()
    for changed in extremes(getattr(scratch, field.name)["eta_g"], 0):
        yield _changed(base, field, lambda m, field, changed=changed: getattr(m, field.name)["eta_g"].CopyFrom(changed))

    def many(message: Message, field: Any) -> None:
        for number in range(MANY):
            getattr(message, field.name).get_or_create(str(number))

    yield _changed(base, field, many)


def _of_values(base: M, field: Any) -> Iterator[M]:
    for value in _FLOATS:
        yield _changed(
            base, field, lambda m, field, value=value: setattr(getattr(m, field.name)["eta_g"], "number_value", value)
        )

    def nested(message: Message, field: Any) -> None:
        value = getattr(message, field.name)["eta_g"]
        for _ in range(40):
            value = value.list_value.values.add()

    def many(message: Message, field: Any) -> None:
        for number in range(MANY):
            getattr(message, field.name)[str(number)].number_value = 1.0

    yield _changed(base, field, nested)
    yield _changed(base, field, many)


def _changed(base: M, field: Any, change: Any) -> M:
    message = type(base)()
    message.CopyFrom(base)
    change(message, field)
    return message


def _set(message: Message, field: Any, value: Any) -> None:
    if field.is_repeated:
        getattr(message, field.name).extend([value] * (2 if isinstance(value, str | bytes) else MANY))
    else:
        setattr(message, field.name, value)


def _put(message: Message, field: Any, value: Message) -> None:
    target = getattr(message, field.name)
    if field.is_repeated:
        target.add().CopyFrom(value)
    else:
        target.CopyFrom(value)


def _is_map(field: Any) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry
