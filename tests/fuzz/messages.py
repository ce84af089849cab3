"""Changes of protobuf messages by their descriptors: one field at a time becomes extreme, absent, repeated or foreign.

All choices come from one `random.Random`, so an input is a function of its seed.
"""

from __future__ import annotations

import math
from random import Random
from typing import Any

from google.protobuf import descriptor
from google.protobuf.message import DecodeError, EncodeError, Message

Field: Any = descriptor.FieldDescriptor
"""The C implementation has its own type."""
FLOATS = (math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, 0.0, -0.0, -1.0, 1.0, 0.5, 2.0**53, 1e-9)
TEXTS = (
    "", "\x00", "a\x00b", "../../x", "/etc/passwd", "..", ".", "-x", "~", "x" * 64, "x" * 65, "x" * 300, "x" * 5000,
    "\x1b[2J\x1b]0;x\x07", "\u202e\ud7ff\n", "\U0010ffff", "%s%n{0}", "' OR 1=1 --", "None", "nan", "1e999", "latest",
    "best", "os:system", "subprocess:run", "fl://admin/x", "{}", "[[", "fedavg", "scaffold",
)  # fmt: skip
BYTES = (b"", b"\x00", bytes(31), bytes(32), bytes(33), b"\xff" * 32, bytes(5000))
_VALUES: dict[int, tuple[Any, ...]] = {
    Field.TYPE_DOUBLE: FLOATS,
    Field.TYPE_FLOAT: FLOATS,
    Field.TYPE_INT64: (-(2**63), -(2**31), -1, 0, 1, 2, 7, 2**31, 2**53, 253_402_300_800, 2**60, 2**63 - 1),
    Field.TYPE_UINT64: (0, 1, 2, 7, 2**31, 2**32, 2**53, 2**60, 2**63 - 1, 2**63, 2**64 - 1),
    Field.TYPE_FIXED64: (0, 1, 2**63, 2**64 - 1),
    Field.TYPE_INT32: (-(2**31), -1, 0, 1, 7, 999_999_999, 2**31 - 1),
    Field.TYPE_UINT32: (0, 1, 2, 7, 100, 2**31 - 1, 2**31, 2**32 - 1),
    Field.TYPE_FIXED32: (0, 1, 2**32 - 1),
    Field.TYPE_ENUM: (0, 1, 2, 3, 10, 99, 2**31 - 1, -1),
    Field.TYPE_BOOL: (False, True),
    Field.TYPE_STRING: TEXTS,
    Field.TYPE_BYTES: BYTES,
}
NAMES = frozenset({"session_id", "run_id", "client_id", "key", "digest", "task"})
NAMES_KEPT = 0.7
"""Fields by which a receiver finds what a message is about are changed less often: most checks come after them."""
COUNTS = (1, 2, 2, 3, 17, 65, 400)
"""Elements that are added to a repeated field."""
DEEPEST = 45
"""Levels of lists in a value; each is two messages, and protobuf stops at 100."""


def mutated(random: Random, message: Message, changes: int) -> Message:
    """A copy of the message with this many changes, or fewer where protobuf refuses to copy what is nested so deep."""
    copy = type(message)()
    copy.CopyFrom(message)
    before = message
    for _ in range(changes):
        try:
            _change(random, copy)
            before = type(message).FromString(copy.SerializeToString())
        except (DecodeError, EncodeError):
            break
    return before


def _change(random: Random, message: Message) -> None:
    """One change, somewhere in the message: with every level it becomes more likely to go deeper."""
    fields = message.DESCRIPTOR.fields
    if not fields:
        return
    present = message.ListFields()
    field: Any = random.choice(present)[0] if present and random.random() < 0.7 else random.choice(fields)
    if field.name in NAMES and random.random() < NAMES_KEPT:
        field = random.choice(fields)
    if _is_map(field):
        _change_map(random, message, field)
    elif field.is_repeated:
        _change_repeated(random, message, field)
    elif field.message_type is not None:
        _change_single(random, message, field)
    elif random.random() < 0.15:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, _value(random, field, getattr(message, field.name)))


def _change_single(random: Random, message: Message, field: Any) -> None:
    """A nested message: absent, empty, or changed inside."""
    draw = random.random()
    if draw < 0.1:
        message.ClearField(field.name)
    elif draw < 0.2:
        getattr(message, field.name).Clear()
        getattr(message, field.name).SetInParent()
    elif draw < 0.25:
        _nest(random, message, field)
    else:
        inner = getattr(message, field.name)
        inner.SetInParent()
        _change(random, inner)


def _change_repeated(random: Random, message: Message, field: Any) -> None:
    """Elements: none, one removed, repeated, swapped, added, or changed inside."""
    values = getattr(message, field.name)
    draw = random.random()
    if draw < 0.1 or (draw < 0.25 and not values):
        del values[:]
    elif draw < 0.2:
        del values[random.randrange(len(values))]
    elif draw < 0.35 and values:
        values.extend([values[random.randrange(len(values))]] * random.choice(COUNTS))
    elif draw < 0.5 and len(values) > 1:
        order = list(values)
        random.shuffle(order)
        kept = [type(each).FromString(each.SerializeToString()) for each in order] if field.message_type else order
        del values[:]
        values.extend(kept)
    elif field.message_type is not None:
        if not values or random.random() < 0.3:
            for _ in range(random.choice(COUNTS)):
                values.add()
        _change(random, random.choice(values))
    elif values and random.random() < 0.5:
        at = random.randrange(len(values))
        values[at] = _value(random, field, values[at])
    else:
        values.extend([_value(random, field, None)] * random.choice(COUNTS))


def _change_map(random: Random, message: Message, field: Any) -> None:
    """Entries of a map: none, one removed, added, or changed."""
    values = getattr(message, field.name)
    key_field, value_field = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    draw = random.random()
    if draw < 0.1:
        values.clear()
        return
    if draw < 0.2 and values:
        del values[random.choice(sorted(values))]
        return
    if draw < 0.25:
        for number in range(random.choice(COUNTS)):
            key = f"k{number}" if key_field.type == Field.TYPE_STRING else number
            if value_field.message_type is None:
                values[key] = _value(random, value_field, None)
            else:
                values.get_or_create(key)
        return
    key = random.choice(sorted(values)) if values and draw < 0.7 else _value(random, key_field, None)
    if value_field.message_type is None:
        values[key] = _value(random, value_field, values.get(key))
    else:
        _change(random, values[key])


def _nest(random: Random, message: Message, field: Any) -> None:
    """A value that contains itself many times, where the type allows it."""
    inner = getattr(message, field.name)
    if inner.DESCRIPTOR.full_name == "google.protobuf.Struct":
        inner = inner.fields["x"]
    if inner.DESCRIPTOR.full_name == "google.protobuf.Value":
        for _ in range(random.randrange(2, DEEPEST)):
            inner = inner.list_value.values.add()
    else:
        _change(random, inner)


def _value(random: Random, field: Any, now: Any) -> Any:
    """A value of the field's type: extreme, or near the present one."""
    if now is not None and random.random() < 0.25:
        if isinstance(now, str):
            return _text(random, now)
        if isinstance(now, int) and not isinstance(now, bool) and field.type != Field.TYPE_ENUM:
            near = now + random.choice((-1, 1))
            lowest, largest = _range(field)
            return min(max(near, lowest), largest)
    return random.choice(_VALUES[field.type])


def _text(random: Random, now: str) -> str:
    """The text with one character more, less or other."""
    at = random.randrange(len(now) + 1)
    return now[:at] + random.choice(("", "x", "\x00", "/", "é", "\U0001f600", " ")) + now[at + random.randrange(2) :]


def _range(field: Any) -> tuple[int, int]:
    values = [value for value in _VALUES[field.type] if isinstance(value, int)]
    return (min(values), max(values)) if values else (0, 1)


def _is_map(field: Any) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry
