"""A run's TOML table as a RunSpec: the keys of the table are the fields of the message.

The operator's commands read run files with it, and a device that checks a run against its policy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.json_format import ParseDict, ParseError

from protos.fl.v1 import admin_pb2

_WHOLE = {FieldDescriptor.TYPE_UINT32: (1 << 32) - 1, FieldDescriptor.TYPE_UINT64: (1 << 64) - 1}
_OF_OPTIMIZER = ("name", "state")
"""Keys of `local.optimizer` that are no arguments of the optimizer."""
MOST_WHOLE = 2**53 - 1
"""The wire has one kind of number in tables of any shape, a float64, which has every whole number up to this size."""
_STRUCT = "google.protobuf.Struct"
SIMULATION = "simulation"
"""The table for `fl simulate` in a run's file. It is not part of the run."""
# The type stubs declare two classes for this one.
_RUN = cast(Descriptor, admin_pb2.RunSpec.DESCRIPTOR)


def parse_run(content: Mapping[str, Any]) -> admin_pb2.RunSpec:
    """RunSpec of a TOML table. Only the types of values are checked; the coordinator checks the values.

    Raises:
        ValueError: an unknown key or a value of the wrong type; the message has its path.
    """
    content = _with_parameters(content)
    _check_table(_RUN, content, ())
    try:
        return ParseDict(dict(content), admin_pb2.RunSpec())
    except ParseError as exc:
        raise ValueError(str(exc)) from exc


def _with_parameters(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The table with the arguments of `local.optimizer`, which stand beside its name, in a table of their own."""
    local = content.get("local")
    optimizer = local.get("optimizer") if isinstance(local, dict) else None
    if isinstance(optimizer, str):
        optimizer = {"name": optimizer}
    if not isinstance(local, dict) or not isinstance(optimizer, dict) or "parameters" in optimizer:
        return content
    nested = {key: value for key, value in optimizer.items() if key in _OF_OPTIMIZER}
    nested["parameters"] = {key: value for key, value in optimizer.items() if key not in _OF_OPTIMIZER}
    return {**content, "local": {**local, "optimizer": nested}}


def _check_table(message: Descriptor, table: Mapping[str, Any], path: tuple[str, ...]) -> None:
    for key, value in table.items():
        field = message.fields_by_name.get(key)
        if field is None:
            raise ValueError(_unknown(message, key, path))
        _check_value(field, value, (*path, key))


def _check_value(field: FieldDescriptor, value: Any, path: tuple[str, ...]) -> None:
    if field.message_type is None:
        if field.is_repeated:
            _check_list(field, value, path)
        else:
            _check_scalar(field, value, path)
        return
    if not isinstance(value, dict):
        raise ValueError(f"{'.'.join(path)}: expected a table [{'.'.join(path)}], got {_describe(value)}")
    if field.message_type.full_name == _STRUCT:
        _check_struct_value(value, path)
    elif field.message_type.GetOptions().map_entry:
        for key, member in value.items():
            _check_value(field.message_type.fields_by_name["value"], member, (*path, key))
    else:
        _check_table(field.message_type, value, path)


def _check_list(field: FieldDescriptor, value: Any, path: tuple[str, ...]) -> None:
    if not isinstance(value, list):
        raise ValueError(f"{'.'.join(path)}: expected a list, got {_describe(value)}")
    for index, member in enumerate(value):
        _check_scalar(field, member, (*path, str(index)))


def _check_scalar(field: FieldDescriptor, value: Any, path: tuple[str, ...]) -> None:
    expected, fits = _expectation(field, value)
    if not fits:
        raise ValueError(f"{'.'.join(path)}: expected {expected}, got {_describe(value)}")


def _expectation(field: FieldDescriptor, value: Any) -> tuple[str, bool]:
    """The expected value of a scalar field as text, and whether `value` is one."""
    # True is an int in Python, but not in TOML.
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if field.type in _WHOLE:
        limit = _WHOLE[field.type]
        return f"a whole number from 0 to {limit}", number and isinstance(value, int) and 0 <= value <= limit
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        return "a finite number", number and _is_finite(value)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return "true or false", isinstance(value, bool)
    return "text", isinstance(value, str)


def _is_finite(value: float) -> bool:
    """Whether a double can hold the number; a whole number of TOML may be larger than any."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _check_struct_value(value: Any, path: tuple[str, ...]) -> None:
    """Raises ValueError for values that a Struct cannot have: dates, times and numbers that are not finite."""
    if isinstance(value, dict):
        for key, member in value.items():
            _check_struct_value(member, (*path, key))
    elif isinstance(value, list):
        for index, member in enumerate(value):
            _check_struct_value(member, (*path, str(index)))
    elif isinstance(value, int) and abs(value) > MOST_WHOLE:
        limit = f"a whole number from -{MOST_WHOLE} to {MOST_WHOLE}, or a larger one as text"
        raise ValueError(f"{'.'.join(path)}: expected {limit}, got {_describe(value)}")
    elif not isinstance(value, bool | str | int | float) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"{'.'.join(path)}: expected text, true, false or a finite number, got {_describe(value)}")


def _unknown(message: Descriptor, key: str, path: tuple[str, ...]) -> str:
    accepted = [*message.fields_by_name, *([] if path else [SIMULATION])]
    where = f"[{'.'.join(path)}]" if path else "the top level"
    text = f"unknown key {'.'.join((*path, key))!r}; {where} accepts: {', '.join(accepted)}"
    sections = [section for section in _sections_with(key) if section != ".".join(path)]
    if close := get_close_matches(key, accepted, n=1):
        return f"{text}. Did you mean {close[0]!r}?"
    return f"{text}. {key!r} belongs to {sections[0]}." if sections else text


def _sections_with(key: str) -> Iterator[str]:
    """The sections that have this key."""
    for field in _RUN.fields:
        if field.name == key:
            yield "the top level, above the first [section]"
        elif field.message_type and key in field.message_type.fields_by_name and not _is_map_or_struct(field):
            yield f"[{field.name}]"


def _is_map_or_struct(field: FieldDescriptor) -> bool:
    kind = field.message_type
    return kind is not None and (kind.GetOptions().map_entry or kind.full_name == _STRUCT)


def _describe(value: Any) -> str:
    """A TOML value with its type, for messages."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"text {value[:80]!r}"
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "a table"
    return f"the date or time {value}"
