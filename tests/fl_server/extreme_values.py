"""Extreme values for every field of a message: the limits of its type, and values beyond them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import ListValue, Struct, Value

Field = Any
"""A FieldDescriptor: protobuf has two classes of that name, and its types disagree about them."""

FLOATS = (math.nan, math.inf, -math.inf, 1e308, 1e100, -1.0, -0.0, 5e-324, 0.5)
TEXTS = (
    "",
    "\0",
    "x" * 100_000,
    "\x1b[31mred\n\x07",
    "9" * 5000,
    "\U0001f600" * 5000,
    "\u202eevil",
    "../../etc/passwd",
)
NUMBERS = {
    FieldDescriptor.TYPE_UINT32: (0, 1, 2**31, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**63, 2**64 - 1),
    FieldDescriptor.TYPE_INT32: (-(2**31), -1, 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), -1, 2**63 - 1),
    FieldDescriptor.TYPE_FIXED32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_FIXED64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_DOUBLE: FLOATS,
    FieldDescriptor.TYPE_FLOAT: FLOATS,
    FieldDescriptor.TYPE_BOOL: (True, False),
    FieldDescriptor.TYPE_ENUM: (99, -1, 2**31 - 1),
    FieldDescriptor.TYPE_STRING: TEXTS,
    FieldDescriptor.TYPE_BYTES: (b"", b"\0" * 100_000),
}


def deep(levels: int) -> Struct:
    """Nested tables."""
    struct = Struct()
    inner = struct
    for _ in range(levels):
        inner = inner.fields["a"].struct_value
    inner.fields["a"].number_value = 1.0
    return struct


def structs() -> Iterator[Struct]:
    """Tables that no task and no method accepts."""
    for number in FLOATS:
        struct = Struct()
        struct.fields["alpha"].number_value = number
        yield struct
    for text in TEXTS:
        yield Struct(fields={text: Value(string_value=text)})
    yield deep(20)
    yield deep(28)  # three messages each; protobuf refuses to parse more than 100 nested ones
    wide, empty = Struct(), Struct()
    for index in range(3000):
        wide.fields[f"name{index}"].number_value = index
    empty.fields["unset"].SetInParent()
    numbers = ListValue(values=[Value(number_value=math.nan)] * 2000)
    listed = Struct(fields={"list": Value(list_value=numbers)})
    unknown = Struct()
    unknown.fields["null"].null_value = cast(Any, 77)
    yield from (wide, empty, listed, unknown)


def changed(message: Message, prefix: str = "") -> Iterator[tuple[str, Any, Message]]:
    """(field, value, a copy of the message with that value), for every field and each of its extreme values."""
    for field in message.DESCRIPTOR.fields:
        name = prefix + field.name
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            yield from _maps(message, field, name)
        elif field.message_type is not None and field.message_type.full_name == Struct.DESCRIPTOR.full_name:
            for struct in structs():
                yield name, str(struct)[:40], _with(message, field.name, struct)
        elif field.message_type is not None and not isinstance(getattr(message, field.name), Message):
            yield from _lists(message, field, name)
        elif field.message_type is not None:
            for path, value, part in changed(getattr(message, field.name), f"{name}."):
                yield path, value, _with(message, field.name, part)
        else:
            yield from _numbers(message, field, name)


def _numbers(message: Message, field: Field, name: str) -> Iterator[tuple[str, Any, Message]]:
    """Numbers and texts; lists of them with one extreme entry, and with many."""
    values: list[Any] = list(NUMBERS[field.type])
    for value in [*([each] for each in values), values[:1] * 5000] if field.is_repeated else values:
        copy = _copy(message)
        if field.is_repeated:
            getattr(copy, field.name).extend(value)
        else:
            setattr(copy, field.name, value)
        yield name, str(value)[:40], copy


def _lists(message: Message, field: Field, name: str) -> Iterator[tuple[str, Any, Message]]:
    """A list with one extreme entry, and with many empty ones."""
    whole = _copy(message)
    entry = getattr(whole, field.name).add()
    for path, value, part in changed(entry, f"{name}."):
        copy = _copy(message)
        getattr(copy, field.name).append(part)
        yield path, value, copy
    getattr(whole, field.name).extend(type(entry)() for _ in range(5000))
    yield name, "5001 empty entries", whole


def _maps(message: Message, field: Field, name: str) -> Iterator[tuple[str, Any, Message]]:
    """Maps with extreme names, extreme values, and many entries."""
    entry = field.message_type.fields_by_name["value"]
    if entry.message_type is not None:
        yield from _maps_of_messages(message, field, name)
        return
    values: list[Any] = list(NUMBERS[entry.type])
    tables = [{text: values[0]} for text in TEXTS] + [{"label": value} for value in values]
    tables.append(dict.fromkeys((f"label{index}" for index in range(5000)), values[0]))
    for table in tables:
        copy = _copy(message)
        getattr(copy, field.name).update(table)
        yield name, str(table)[:40], copy


def _maps_of_messages(message: Message, field: Field, name: str) -> Iterator[tuple[str, Any, Message]]:
    """Maps with an extreme name, one extreme entry, and many empty ones."""
    for keys in [[text] for text in TEXTS] + [[f"name{index}" for index in range(5000)]]:
        copy = _copy(message)
        for key in keys:
            getattr(copy, field.name)[key].SetInParent()
        yield name, str(keys)[:40], copy
    for path, value, part in changed(_copy(getattr(_copy(message), field.name)["alpha"]), f"{name}."):
        copy = _copy(message)
        getattr(copy, field.name)["alpha"].CopyFrom(part)
        yield path, value, copy


def _with(message: Message, field: str, part: Message) -> Message:
    copy: Message = _copy(message)
    getattr(copy, field).CopyFrom(part)
    return copy


def _copy(message: Message) -> Any:
    copy = type(message)()
    copy.CopyFrom(message)
    return copy
